"""The settings of the algorithm together with those of the methods in this folder."""

import importlib
from dataclasses import dataclass
from pathlib import Path

import grpo


def load_settings() -> list[type]:
    """Import the files of this folder, which registers their methods, and return their settings."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("[!_]*.py"))
    modules = [importlib.import_module(f"algorithms.{name}") for name in names]
    return [module.Settings for module in modules if hasattr(module, "Settings")]


@dataclass(frozen=True)
class AlgorithmWithMethods(grpo.Algorithm, *load_settings()):
    """Methods"""  # title of a section of --help; this class adds no flags, so the section is not shown

    @property
    def methods(self) -> list[grpo.Method]:
        return [method for method in grpo.METHODS if method.is_on(self)]
