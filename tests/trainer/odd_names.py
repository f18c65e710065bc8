"""Unusual column names, as people and spreadsheets write them."""

from hypothesis import strategies as st

#: Punctuation, other alphabets, names reserved by Python, Keras or Flotilla, and similar names.
ODD = (
    "", " ", "a b", "a_b", "a-b", "a.b", "a  b", "A_B", "Sepal Length (cm)", "größe", "grösse",
    "年齢", "😀",
    "user/age", "/", "a/", "..", "../x", "50%", "%s", "{x}", "[0]", "a:b", "a=b", "a@b", "$",
    "*", "\\",
    "'", '"', "line\nbreak", "\x1b[2J", "\u202erevo", "\ufeffid", "x" * 300, "_x", "-x", "1st", "0",
    "é",
    "e\u0301", "class", "from", "None", "self", "name", "inputs", "training", "mask", "config",
    "class_name", "__proto__", "all", "flatten", "hidden_0", "logits", "expand_dims", "where",
    "isnan",
    "concatenate", "tabular", "x", "x_normalization", "x_embedding", "flotilla_input", "examples",
    "age.0123456789abcdef", "age_0123456789abcdef",
)  # fmt: skip


def names() -> st.SearchStrategy[str]:
    """Return a strategy for any column name: odd names, random text, or very similar names."""
    alike = st.text(alphabet="aA_ -./b1", min_size=1, max_size=4)
    # A readable file cannot contain a lone surrogate.
    texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=60)
    return st.sampled_from(ODD) | texts | alike
