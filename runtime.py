"""What is not about the experiment: process group, device and dtype, seeds, schedules, checkpoint, log."""


class BadInput(ValueError):
    """A fault of the input, not of the program: one sentence that names the file or flag and what to do."""
