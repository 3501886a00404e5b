"""Look at runs, data and models: the commands `megarl show`, `plot`, `data` and `chat`.

The commands only read. They work while a job is still writing its run folder."""
