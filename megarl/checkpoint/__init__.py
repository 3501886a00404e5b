"""Write checkpoints, and read them with any number of ranks and any parallel sizes.

Every tensor is stored under its Hugging Face name and shape, in rectangles.

    step_100/
      checkpoint.json             the manifest: size and SHA-256 of every file, where each rectangle is, and a small state in JSON
      weights-00000.safetensors   what rank 0 wrote of the weights; fp32 where the optimizer has fp32 masters
      exp_avg-00000.safetensors   Adam's first moments, and so on

Each rank writes rectangles of the canonical tensors straight out of its shards and reads those that its new
shards need, so a checkpoint of any TP, PP, CP, EP, DP loads into any other, bit for bit, without a gather.
What several ranks hold is written by one of them. A tensor that is whole in one file has its plain name as
key there: such a file is what it would be in a Hugging Face folder.

A checkpoint is written beside its place, its manifest last, and then renamed: a folder without a manifest is
none. The manifest has a digest of itself. Ranks on several machines need one file system.

Why not torch.distributed.checkpoint: its metadata is a pickle, which runs code when it is read, its
safetensors writer has room for one rectangle of a tensor per file, and its planners, which would have to be
subclassed, gather what follows from the atlases. This has no pickle anywhere, is read without ranks (`megarl
convert`), and its files open in any safetensors reader. Megatron's own `torch_dist` checkpoints can be
converted (`torch_dist.py`)."""
