"""What a `quantization_config` means, whatever tool wrote it."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from minimax_jax.quantization.modules import ModuleSet

if TYPE_CHECKING:  # configs are read without JAX
    from pallas_kernels.quant import FormatName


@dataclasses.dataclass(frozen=True)
class Scheme:
    """What is declared for a module.

    Attributes:
      format: of its weight.
      activation: how its input is quantised when it runs, in the spelling of `pallas_kernels.quant.Format.activation`;
        None leaves it as it is. "nvfp4" has a static global scale, which the checkpoint must hold.
      not_emulated: the module's input is quantised in a way that is never emulated: this one.
    """

    format: FormatName
    activation: FormatName | None = None
    not_emulated: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """What is declared for each module; tensors decide first, this second.

    Attributes:
      quant_method: as published.
      exclude: modules that are not quantised, whatever the rest says.
      modules: schemes for some modules; the first that names a module holds.
      default: the scheme of the others; None where nothing is declared for them.
      weight_block_size: (rows, cols) of an FP8 weight that share a scale, consulted only for a grid of scales that fits
        it; absent or null reads as 128 x 128.
      published: the section as it was read, as JSON.
    """

    quant_method: str
    exclude: ModuleSet = dataclasses.field(default_factory=ModuleSet)
    modules: tuple[tuple[ModuleSet, Scheme], ...] = ()
    default: Scheme | None = Scheme("fp8", "fp8")
    weight_block_size: tuple[int, int] = (128, 128)
    published: str = dataclasses.field(default="", compare=False, repr=False)

    def excluded_by(self, module: str) -> str | None:
        """The entry of the list of exclusions that holds `module`, None where none does."""
        return self.exclude.find(module)

    def declared(self, module: str) -> Scheme | None:
        """What is declared for `module`; None for an excluded one, and where nothing is said."""
        if self.excluded_by(module) is not None:
            return None
        for modules, scheme in self.modules:
            if modules.find(module) is not None:
                return scheme
        return self.default

    def to_dict(self) -> dict[str, Any]:
        """The section as it was published; of a config made in code, the vendor's spelling of FP8."""
        if self.published:
            data: dict[str, Any] = json.loads(self.published)
            return data
        if self.quant_method != "fp8":
            raise ValueError(f"a {self.quant_method} config made in code has no published spelling")
        return {
            "activation_scheme": "dynamic",
            "fmt": "float8_e4m3fn",
            "quant_method": "fp8",
            "weight_block_size": list(self.weight_block_size),
            "modules_to_not_convert": list(self.exclude.entries),
        }

    def describe(self) -> str:
        """One line for people."""
        schemes = dict.fromkeys(
            scheme.format for scheme in (*(scheme for _, scheme in self.modules), self.default) if scheme is not None
        )
        named = ", ".join(schemes) or "nothing"
        return named if named == self.quant_method else f"{named} ({self.quant_method})"
