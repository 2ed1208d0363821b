"""How a run ended: well, or with an error."""

from __future__ import annotations

import dataclasses

from pipetransformer.core.wire import (
    LONGEST_NAME,
    Fields,
    check_choice,
    check_str,
    printable,
)

_WELL = "well"
_LONGEST = 500  # letters of an error's text


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a run ended.

    Attributes:
        error: The name of the error's type; None where the run ended well.
        text: What the error says, as one line, cut.
    """

    error: str | None = None
    text: str = ""

    @classmethod
    def of(cls, error: BaseException | None) -> Ending:
        """Return the ending with an error, or without one."""
        if error is None:
            return cls()
        return cls(
            printable(type(error).__name__, longest=LONGEST_NAME),
            printable(str(error), longest=_LONGEST),
        )

    @property
    def is_good(self) -> bool:
        """True where no error has ended the run."""
        return self.error is None

    def __str__(self) -> str:
        """Return it as the end of a sentence about the run."""
        if self.is_good:
            return "ended well"
        return f"ended with {self.error}" + (f": {self.text}" if self.text else "")

    @classmethod
    def from_json(cls, value: object, what: str) -> Ending:
        """Read what `to_json` gave; `what` is its name in errors.

        Raises:
            ValueError: it is neither the word for a good end nor an error.
        """
        if isinstance(value, str):
            check_choice(value, what, (_WELL,))
            return cls()
        fields = Fields(value, what)
        return cls(fields.read("error", _check_name), fields.read("text", check_str))

    def to_json(self) -> str | dict[str, str]:
        """Return it in the summary's format."""
        return _WELL if self.error is None else dataclasses.asdict(self)


def _check_name(value: object, what: str) -> str:
    return check_str(value, what, longest=LONGEST_NAME)
