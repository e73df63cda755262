"""Problems by name: data sets of the hub or of a local folder, read by `datasets`.

csd ships no data set: rows, and the worked examples in front of a question, come from the user's
machine or the hub.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from csd.evaluate.problems.tasks import TASKS, Problem, Task, problems_of, read
from csd.utils.check import shown
from csd.utils.files import digest
from csd.utils.hub import hub_or_cache, no_hub, unreached
from csd.utils.lazy import check_installed


@dataclass(frozen=True, slots=True)
class Named:
    """A data set of the hub. shots: True if its train split has worked examples."""

    path: str
    config: str | None
    task: str
    shots: bool = False


NAMES = {
    "gsm8k": Named("openai/gsm8k", "main", "gsm8k", shots=True),
    "math500": Named("HuggingFaceH4/MATH-500", None, "math"),
    "humaneval": Named("openai/openai_humaneval", None, "humaneval"),
}
# configuration of a folder's data set, if it has several
_CONFIGS = {named.task: named.config for named in NAMES.values()}


@dataclass(frozen=True, slots=True)
class Source:
    """A file, a folder or a name of `NAMES` with problems, and their task."""

    name: str
    task: Task
    task_name: str

    @classmethod
    def of(cls, name: str, task: str | None) -> "Source":
        """Raises ValueError for another task than a name's, and for what is neither."""
        if name in NAMES:
            own = NAMES[name].task
            if task not in (None, own):
                raise ValueError(
                    f"task of {name} must be {own!r}, got {task!r}; a file or folder of that name "
                    f"is ./{name}"
                )
            return cls(name, TASKS[own], own)
        if not Path(name).exists() and not Path(name).suffix:
            raise ValueError(
                f"problems must be a file, a folder or one of {', '.join(NAMES)}, got {name!r}"
            )
        wanted = task or "jsonl"
        return cls(name, TASKS[wanted], wanted)

    @property
    def is_file(self) -> bool:
        return self.name not in NAMES and not Path(self.name).is_dir()

    def lacks(self, others: bool) -> list[str]:
        """Names what reading the rows needs and this machine lacks: the package, and then the hub.

        others: True to ask for the hub although the package is there. It may have rows in a cache.
        """
        if self.is_file:
            return []
        lacking = []
        try:
            check_installed("datasets", "eval", f"csd eval {self.name}")
        except ImportError as error:
            lacking.append(str(error))
        if self.name in NAMES and (lacking or others) and (why := no_hub()):
            lacking.append(
                f"{why}, and rows that datasets has not cached come from there, or from a file "
                f"with --task {self.task_name}"
            )
        return lacking

    def read(self, prefix: str | None = None) -> tuple[list[Problem], str]:
        """Problems, and the SHA-256 of their file or rows.

        prefix: text of worked examples in front of each question. Raises ValueError, naming the
        row and the key, ImportError without `datasets`, and its errors.
        """
        ask = None if prefix is None else lambda text: f"{prefix}{self.task.shot.format(text)}"
        if self.is_file:
            return read(self.name, self.task, ask), digest(self.name)
        rows = rows_of(self.name, "test", self.task_name)
        data = "".join(json.dumps(row, sort_keys=True, default=str) + "\n" for row in rows)
        numbered = ((f"{self.name}, row {i}", row) for i, row in enumerate(rows))
        problems = problems_of(numbered, self.name, self.task, ask)
        return problems, hashlib.sha256(data.encode()).hexdigest()

    def shots(self, count: int) -> str:
        """Text of the first `count` examples of the train split, as `read` continues it.

        Raises ValueError if the data set has no worked examples, or fewer.
        """
        task, named = self.task, NAMES.get(self.name)
        if not task.worked or self.is_file or (named and not named.shots):
            raise ValueError(
                f"shots needs a data set with worked examples in a train split, such as gsm8k; "
                f"{self.name} has none: give their text as prompt_file"
            )
        rows = rows_of(self.name, "train", self.task_name)[:count]
        if len(rows) < count:
            raise ValueError(f"shots must be at most {len(rows)}, the train split, got {count}")
        return "".join(
            f"{task.shot.format(self._text(row, task.question))} {self._text(row, task.worked)}\n\n"
            for row in rows
        )

    def _text(self, row: dict, key: str) -> str:
        if not isinstance(row.get(key), str):
            raise ValueError(
                f"a worked example of {self.name} must have a string as {key!r}, "
                f"got {shown(row.get(key))}"
            )
        return row[key]


def rows_of(name: str, split: str, task: str) -> list[dict]:
    """Rows of a split of a named data set, or of a local folder.

    A folder is one that `save_to_disk` wrote, or one with JSON, Parquet or CSV files, whose only
    split is also its test split. Raises ValueError if it has no such split.
    """
    import datasets

    if name in NAMES:
        named = NAMES[name]
        with hub_or_cache(named.path):
            try:
                return list(datasets.load_dataset(named.path, named.config, split=split))
            except (OSError, ValueError) as error:
                if why := unreached():
                    raise ConnectionError(
                        f"the data set {named.path} is not in the cache of datasets here, and "
                        f"{why}; give its rows as a file, with --task {named.task}"
                    ) from error
                raise
    folder = Path(name)
    if any((folder / file).exists() for file in ("dataset_dict.json", "state.json")):
        splits: Any = datasets.load_from_disk(str(folder))
    else:
        known = datasets.get_dataset_config_names(str(folder))
        config = _CONFIGS.get(task)
        splits = datasets.load_dataset(str(folder), config if config in known else None)
    if isinstance(splits, datasets.Dataset):
        splits = {str(splits.split or "train"): splits}
    if split == "test" and len(splits) == 1:
        (split,) = splits
    if split not in splits:
        raise ValueError(f"{name} must have a split {split!r}, got {', '.join(map(repr, splits))}")
    return list(splits[split])
