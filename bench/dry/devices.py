"""The devices that the checks of the dry device run on."""

import json
import subprocess


def gpus(neap: str) -> list[str]:
    """The names of the executable's built-in GPUs.

    Raises:
        CalledProcessError: if the executable does not answer.
    """
    answer = json.loads(subprocess.check_output([neap, "device", "list", "--json"], text=True))
    return [row["name"] for row in answer["devices"] if row["name"] != "host"]
