"""The errors a user can meet. Each message is one line that names the thing, what was found, what was expected and
the way out; the command line prints it and exits with 2."""


class MinimaxError(Exception):
    """Base of every error that this package raises for bad input."""


class ConfigError(MinimaxError):
    """A `config.json`, an option or a mesh that cannot be used."""


class CheckpointError(MinimaxError):
    """A checkpoint file that is missing, damaged, or does not fit its config."""


class RequestError(MinimaxError):
    """A prompt or a sampling value that cannot be served."""
