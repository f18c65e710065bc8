import json
import subprocess
import sys

PROGRAM = """
import json, sys
from types import ModuleType
from trainer import optional_packages
optional_packages.leave_out()
optional_packages.leave_out()

def imports(importer, name):
    try:
        exec(f"import {name}", {"__name__": importer})
    except ModuleNotFoundError as error:
        return error.name
    return ""

found = [imports("keras.src.wrappers", "sklearn"), imports("keras.src.wrappers", "csv"),
         imports("keras_hub.models", "sklearn"), imports("mine", "sklearn")]
print(json.dumps(found))
"""


def test_keras_alone_finds_none_of_them():
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True)
    assert json.loads(done.stdout) == ["sklearn", "", "", ""]
