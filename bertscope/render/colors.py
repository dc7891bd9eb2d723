"""The colours of the charts: one for each meaning, for light and for dark pages.

Parts of the memory have those of Okabe and Ito 2008, which people with any common colour blindness can distinguish.
Roles of modules have others, so that no colour has two meanings; their boxes contain words, dark on the light tints
and light on the dark ones.
"""

# Meaning -> the colour on a light page and on a dark one. The parts are in their order from the ground up: what is
# there all the time, then what comes and goes.
PARTS = {
    "parameters": ("#0072B2", "#3D95D6"),
    "buffers": ("#999999", "#8A9199"),
    "optimizer_state": ("#56B4E9", "#8CCFF5"),
    "inputs": ("#F0E442", "#DCD24A"),
    "gradients": ("#E69F00", "#E8A93A"),
    "activations": ("#009E73", "#2BB38B"),
    "temporaries": ("#CC79A7", "#D58BB4"),
    "gathered_parameters": ("#7A4B9C", "#A983C9"),
    "communication": ("#8C5A2B", "#B98A5A"),
}
ROLES = {
    "embeddings": ("#C3BDEB", "#544D93"),
    "attention": ("#F2B8AC", "#8A4339"),
    "feed-forward": ("#DAD48F", "#635F22"),
    "LayerNorm": ("#CDB09C", "#6B503E"),
    "pooler and heads": ("#A9CCD3", "#33626C"),
}


def variable(kind: str, name: str) -> str:
    """Return the reference of a style sheet to the colour of a `part` or a `role`."""
    return f"var({_name(kind, name)})"


def declarations(place: int) -> str:
    """Return the variables of all colours: of light pages (0) or of dark ones (1)."""
    named = [("part", PARTS), ("role", ROLES)]
    return " ".join(f"{_name(kind, name)}: {both[place]};" for kind, found in named for name, both in found.items())


def _name(kind: str, name: str) -> str:
    return f"--{kind}-{name.replace(' ', '-').replace('_', '-').lower()}"
