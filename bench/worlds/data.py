"""Reads the public data sets of the environments. Nothing is downloaded or written.

docs/benchmarks.md describes the content of each file.
"""

from __future__ import annotations

import gzip
import os
import struct
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

#: Environment variable that names the folder of the data sets.
FOLDER_VARIABLE = "METABAN_BENCH_DATA"


class DataMissing(Exception):
    """A data set was not found."""


def data_folder(named: Path | None) -> Path | None:
    """The folder to read: the named one, else that of METABAN_BENCH_DATA, else the one beside the checkout."""
    if named is not None:
        return named
    variable = os.environ.get(FOLDER_VARIABLE)
    return Path(variable) if variable else folder_beside_checkout(Path(__file__))


def folder_beside_checkout(module: Path) -> Path | None:
    """`shared/data` beside the checkout that holds a module; None when either does not exist."""
    for folder in module.resolve().parents:
        if (folder / "pyproject.toml").is_file():
            data = folder.parent / "shared" / "data"
            return data if data.is_dir() else None
    return None


def _existing(folder: Path | None, name: str) -> Path:
    if folder is None:
        raise DataMissing(f"there is no data folder; name the folder that has {name} with --data or {FOLDER_VARIABLE}")
    path = folder / name
    if not path.is_file():
        raise DataMissing(f"{name} is not in {folder}; name the folder that has it with --data")
    return path


@lru_cache(maxsize=2)
def movielens_ratings(folder: Path | None) -> NDArray[np.float64]:
    """MovieLens-100k as a dense matrix, users by items in order of their ids; 0 means no rating."""
    with gzip.open(_existing(folder, "movielens-100k-ratings.tsv.gz"), "rt") as file:
        rows = np.loadtxt(file, skiprows=1, usecols=(0, 1, 2))
    users, user_rows = np.unique(rows[:, 0], return_inverse=True)
    items, item_rows = np.unique(rows[:, 1], return_inverse=True)
    ratings = np.zeros((len(users), len(items)))
    ratings[user_rows, item_rows] = rows[:, 2]
    return ratings


@lru_cache(maxsize=2)
def movielens_profiles(folder: Path | None) -> NDArray[np.float64]:
    """Users of MovieLens-100k in order of their ids: age, gender as ±1, and one column for each occupation."""
    with gzip.open(_existing(folder, "movielens-100k-users.tsv.gz"), "rt") as file:
        rows = np.loadtxt(file, skiprows=1, usecols=(0, 1, 2, 3), dtype=str)
    rows = rows[np.argsort(rows[:, 0].astype(np.int64))]
    occupations = np.unique(rows[:, 3])
    age, gender = rows[:, 1].astype(np.float64), np.where(rows[:, 2] == "M", 1.0, -1.0)
    return np.column_stack([age, gender, (rows[:, 3:] == occupations).astype(np.float64)])


@lru_cache(maxsize=2)
def movielens_films(folder: Path | None) -> list[tuple[int, tuple[str, ...]]]:
    """Release year, 0 if unknown, and genres of the items of MovieLens-100k, in order of their ids."""
    with gzip.open(_existing(folder, "movielens-100k-items.tsv.gz"), "rt") as file:
        rows = [line.rstrip("\n").split("\t") for line in file.readlines()[1:]]
    rows.sort(key=lambda row: int(row[0]))
    return [(int(year) if year.isdigit() else 0, tuple(genres.split(" "))) for _, _, year, genres in rows]


@lru_cache(maxsize=2)
def yelp_entries(folder: Path | None) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """Entries (user, item, ±1), user features and item features."""
    with np.load(_existing(folder, "yelp.npz"), allow_pickle=False) as arrays:
        return (
            arrays["entries"].astype(np.int64),
            arrays["user_features"].astype(np.float64),
            arrays["item_features"].astype(np.float64),
        )


@lru_cache(maxsize=4)
def digit_images(folder: Path | None, name: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Images [n, 784] with values in [0, 1], and their classes, of `mnist` or `notmnist`."""
    images = _idx(_existing(folder, f"{name}-images-idx3-ubyte.gz"))
    labels = _idx(_existing(folder, f"{name}-labels-idx1-ubyte.gz"))
    return (images.reshape(len(images), -1) / np.float32(255)).astype(np.float32), labels.astype(np.int64)


@lru_cache(maxsize=2)
def sine_nets(named: Path | None) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The model-fusion authors' sine tasks [1000, amplitude and phase] and a [1-100-1] network for each [1000, 301]."""
    with np.load(_existing(data_folder(named), "sine-nets.npz"), allow_pickle=False) as arrays:
        return arrays["tasks"].astype(np.float32), arrays["nets"].astype(np.float32)


def _idx(path: Path) -> NDArray[np.uint8]:
    """Read an array in the idx format: two zero bytes, a type, the number of dimensions, then sizes as big-endian
    integers.
    """
    with gzip.open(path, "rb") as file:
        zeros, kind, dimensions = struct.unpack(">HBB", file.read(4))
        if zeros or kind != 8:
            raise DataMissing(f"{path.name} is not an idx file of bytes")
        shape = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
        return np.frombuffer(file.read(), dtype=np.uint8).reshape(shape)
