"""Run the notebooks in a real kernel, and write what they show into their files.

`make notebooks` calls this; it needs `pip install 'hookline[notebooks,serve]'`. What changes from one run to the next
(times, versions, numbers of executions of other sessions) is not written, so that a run that shows the same leaves the
same file. `tests/test_notebooks.py` runs the same cells without a kernel, and compares.

    python notebooks/execute.py [NAME.ipynb ...]
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def main() -> None:
    """Run those that are named, or all."""
    for path in [Path(name) for name in sys.argv[1:]] or sorted(HERE.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        NotebookClient(notebook, kernel_name="python3", resources={"metadata": {"path": HERE}}).execute()
        notebook.metadata = nbformat.from_dict(METADATA)
        for cell in notebook.cells:
            cell.metadata = nbformat.from_dict({})
            if cell.cell_type == "code":  # on stderr are notes of other packages, with paths of this machine
                cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        nbformat.write(notebook, path)
        print(path.name)


if __name__ == "__main__":
    main()
