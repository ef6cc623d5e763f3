"""``python -m generator``."""

import sys

from generator.cli import main

if __name__ == "__main__":
    code: int | str
    try:
        code = main()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "generator":
            raise
        code = (
            f"error: {error.name} is not installed here. nox brings it along: `nox -s check`, `nox -s generate`; or "
            "run `source .nox/light/bin/activate` once a session has made that environment."
        )
    sys.exit(code)
