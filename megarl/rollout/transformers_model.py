"""Run a Hugging Face model on a batch of sequences, each of which has a row of the KV cache.

A position of a row is the position of a token in its sequence, so nothing is padded on the left."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from megarl.config.hf_config import ModelShape
from megarl.reshard.atlas import KEPT_IN_FP32
from megarl.reshard.transformers_atlas import transformers_atlas


class RowCache:
    """The KV cache of a batch, as the layers of a transformers model see it. Row i belongs to sequence i.

    Memory is allocated at the first use, in the shapes that the layers give: heads of keys and values, or the
    latents of latent attention."""

    def __init__(self, num_rows: int, max_length: int) -> None:
        self._size = num_rows, max_length
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def select(self, rows: slice, positions: Tensor, length: int) -> None:
        """Set where the next forward pass writes, and how many tokens of each row it attends to.

        Takes positions [rows, new tokens]."""
        self._rows, self._positions, self._length = rows, positions, length
        self._numbers = torch.arange(rows.start, rows.stop, device=positions.device)[:, None]

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store the new keys and values of a layer, and return those of all tokens.

        This is the method of transformers' `Cache` that attention layers call. Takes and returns
        [rows, heads, tokens, d]."""
        if layer not in self._layers:  # zeros, because a masked NaN would still be one
            rows, length = self._size
            self._layers[layer] = tuple(
                new.new_zeros(rows, new.shape[1], length, new.shape[3]) for new in (keys, values)
            )
        for stored, new in zip(self._layers[layer], (keys, values), strict=True):
            stored[self._numbers, :, self._positions] = new.transpose(1, 2)
        keys, values = self._layers[layer]
        return keys[self._rows, :, : self._length], values[self._rows, :, : self._length]

    def move(self, row: int, to: int) -> None:
        for pair in self._layers.values():
            for stored in pair:
                stored[to] = stored[row]

    def release(self) -> None:
        self._layers.clear()


class CachedModel:
    """A Hugging Face model and the KV cache of the sequences that it computes. It starts without weights.

    Args:
        folder: its config.json is read.
        num_rows, max_length: size of the cache."""

    def __init__(
        self, folder: str, dtype: torch.dtype, device: torch.device, num_rows: int, max_length: int
    ) -> None:
        self.module, self.device = _build(folder, dtype, device), device
        self.cache = RowCache(num_rows, max_length)
        self._shape = ModelShape.load(folder)

    @torch.no_grad()
    def logits(self, first: int, new: Sequence[Sequence[int]], num_cached: Sequence[int]) -> Tensor:
        """Compute new tokens of neighbouring rows, and return the logits after the last token of each row.

        Args:
            first: first of the rows.
            new: tokens of each row that are not in the cache yet.
            num_cached: number of tokens of each row before these.
        Returns: [rows, V] float32. Logits rounded to bf16 would be off by as much as the gate's limit."""
        width = max(map(len, new))
        length = max(len(tokens) + cached for tokens, cached in zip(new, num_cached, strict=True))
        ids = torch.tensor([[*tokens, *[0] * (width - len(tokens))] for tokens in new], device=self.device)
        starts = torch.tensor(num_cached, device=self.device)[:, None]
        positions = starts + torch.arange(width, device=self.device)
        self.cache.select(slice(first, first + len(new)), positions, length)
        hidden = self.module.base_model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=self._masks(positions, length),
            past_key_values=self.cache,
            use_cache=True,
        ).last_hidden_state
        last = torch.tensor([len(tokens) - 1 for tokens in new], device=self.device)
        hidden = hidden[torch.arange(len(new), device=self.device), last]
        return F.linear(hidden.float(), self.module.get_output_embeddings().weight.float())

    def _masks(self, positions: Tensor, length: int) -> Tensor | dict[str, Tensor]:
        """Return which of the first `length` tokens each new token sees, [rows, 1, new tokens, length] bool.

        A model whose layers differ gets one mask for each kind. Takes positions [rows, new tokens]."""
        distance = positions[:, None, :, None] - torch.arange(length, device=self.device)
        full, window = distance >= 0, self._shape.sliding_window
        kinds = set(self._shape.sliding_layers)
        if True not in kinds:
            return full
        sliding = full & (distance < window)
        return sliding if kinds == {True} else {"full_attention": full, "sliding_attention": sliding}

    def weights(self) -> dict[str, Tensor]:
        """Return name -> [rows, cols] view of each live weight.

        Raises: RuntimeError if they are not those of the atlas."""
        atlas, parameters = transformers_atlas(self._shape), dict(self.module.named_parameters())
        if parameters.keys() != atlas.keys():
            raise RuntimeError(
                f"the parameters of transformers' {type(self.module).__name__} are not those that megarl "
                "knows: "
                f"{sorted(parameters.keys() ^ atlas.keys())}"
            )
        return {name: parameters[name].data.view(param.rows, param.cols) for name, param in atlas.items()}


def _build(folder: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Return the model of a folder's config.json without weights."""
    config = AutoConfig.from_pretrained(folder)
    with no_init_weights(), device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    # A buffer that the trainer has as a weight becomes a parameter, which the double buffer switches.
    for path, buffer in list(model.named_buffers()):
        if path.endswith(KEPT_IN_FP32):
            module, name = model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]
            delattr(module, name)
            module.register_parameter(name, torch.nn.Parameter(buffer.float(), requires_grad=False))
    model.tie_weights()
    return model.requires_grad_(False)


def end_ids(folder: str) -> frozenset[int]:
    """Return the token ids that end a response, by generation_config.json or config.json."""
    try:
        generation = GenerationConfig.from_pretrained(folder)
    except OSError:  # there is none
        generation = GenerationConfig.from_model_config(AutoConfig.from_pretrained(folder))
    ids = generation.eos_token_id
    return frozenset([] if ids is None else [ids] if isinstance(ids, int) else ids)
