"""Laws of a scheme's text: ``parse`` reads back the text of ``spec``, a plain name is the default, and wrong text is refused."""

from __future__ import annotations

from kvcompile.errors import UnknownOption, UnknownScheme
from kvcompile.schemes import Scheme, make, parse
from kvcompile.testing.laws import Over, law, unlike

TEXT = "make the class a frozen dataclass whose fields are plain options with defaults; `spec` and `parse` come from them"


@law(Over.SETTINGS, TEXT)
def spelling_reads_back(scheme: Scheme) -> None:
    """Check that ``parse(spec())`` is an equal scheme with an equal hash; raises Unlike."""
    for text in (scheme.spec(), f"  {scheme.spec()} "):
        found = parse(text)
        if found != scheme or hash(found) != hash(scheme):
            unlike(f"{scheme!r} from {text!r}", repr(found))


@law(Over.DEFAULT, TEXT + "; `variants` begins with the default, and no two are alike")
def plain_name_is_the_default(scheme: Scheme) -> None:
    """Check that the name alone parses to the default, the first of ``variants``, and that no two variants are equal; raises Unlike."""
    if not parse(scheme.name) == scheme == scheme.variants()[0]:
        unlike(f"{scheme!r} from the name, and first of the variants", f"{parse(scheme.name)!r}, {scheme.variants()[0]!r}")
    texts = [variant.spec() for variant in scheme.variants()]
    if len(set(texts)) < len(texts):
        unlike("variants that differ", texts)


@law(Over.DEFAULT, TEXT)
def wrong_text_is_refused(scheme: Scheme) -> None:
    """Check that an unknown option raises an error with all options, and a misspelled name one with the nearest name; raises Unlike."""
    try:
        make(scheme.name, no_such_option=1)
    except UnknownOption as error:
        missing = [field.name for field in scheme.options() if field.name not in str(error)]
        if missing:
            unlike("an error that names all options", f"one without {missing}")
    else:
        unlike("an error for the option 'no_such_option'", "none")
    near = scheme.name[:-1] + "x" + scheme.name[-1]
    try:
        make(near)
    except UnknownScheme as error:
        if f"did you mean {scheme.name!r}" not in str(error):
            unlike(f"{near!r} to be taken for a slip of {scheme.name!r}", str(error))
    else:
        unlike(f"an error for the name {near!r}", "none")
