import inspect

import pytest

import fxq
from fxq.errors import PatternError
from fxq.rewriting.match import Match
from fxq.rewriting.pattern import FUSIONS, MATCH, fusion, rewrite
from tests.support.helpers import restored_fusions


@pytest.fixture
def fusions():
    with restored_fusions() as rules:
        yield rules


def here(offset=0):
    """`file:line` of the caller's line, `offset` lines further."""
    frame = inspect.currentframe().f_back
    return f"rewriting/test_pattern.py:{frame.f_lineno + offset}"


# ---- tracing


def test_a_function_becomes_a_pattern():
    expected = here(+2)

    @rewrite
    def conv_relu(op, x, w, b):
        return op.relu(op.conv2d(x, w, b, stride=(2, 2)))

    (rule,) = conv_relu
    assert (rule.name, rule.source) == ("conv_relu", expected)
    assert (rule.captures, rule.size, rule.root.name) == (("x", "w", "b"), 2, "relu")
    assert str(rule.root) == "relu(conv2d(x, w, b))"
    (conv,) = rule.root.inputs
    assert conv.options == {"stride": (2, 2)} and [p.op for p in conv.inputs] == [None] * 3


def test_a_pattern_may_hold_lists_numbers_and_several_outputs():
    @rewrite
    def split(op, x, y):
        both = op.cat([x, y], dim=1)
        return op.relu(both), op.mul(both, 2)

    (rule,) = split
    assert [str(p) for p in rule.outputs] == ["relu(cat([x, y]))", "mul(cat([x, y]), 2)"]
    assert rule.outputs[0].inputs[0] is rule.outputs[1].inputs[0]
    assert rule.size == 3 and rule.root.name == "relu"


def test_keyword_parameters_make_a_family():
    @rewrite("{layer}_then_{act}", layer=("conv1d", "linear"), act=("relu", "silu"))
    def family(op, x, w, b, *, layer, act):
        return op[act](op[layer](x, w, b))

    assert [rule.name for rule in family] == [
        "conv1d_then_relu",
        "conv1d_then_silu",
        "linear_then_relu",
        "linear_then_silu",
    ]
    assert family[1].variant == {"layer": "conv1d", "act": "silu"}
    assert [str(rule.root) for rule in family[2:]] == ["relu(linear(x, w, b))", "silu(linear(x, w, b))"]


def test_a_family_without_a_name_is_called_after_its_function_and_variants():
    @rewrite(act=("relu",))
    def only(op, x, *, act):
        return op[act](x)

    assert only[0].name == "only_relu"


def test_guards_and_replacements_belong_to_every_rule_of_the_family():
    @rewrite(act=("relu", "silu"), exclusive=False)
    def both(op, x, *, act):
        return op[act](x)

    @both.unless
    def never(m):
        return False

    @both.becomes
    def nothing(op, m):
        return m.x

    assert [rule.guards for rule in both] == [[never], [never]]
    assert {rule.replacement for rule in both} == {nothing}
    assert not any(rule.exclusive for rule in both)


# ---- what is no pattern


def test_an_unknown_op_names_the_nearest_and_the_place():
    with pytest.raises(
        PatternError, match=r"'typo' \(rewriting/test_pattern.py:\d+\): unknown op 'conv2'; did you mean '?conv"
    ):

        @rewrite
        def typo(op, x, w):
            return op.relu(op.conv2(x, w))


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(PatternError, match=r"unknown option of op\.conv2d 'strid'; did you mean 'stride'"):

        @rewrite
        def typo(op, x, w):
            return op.conv2d(x, w, strid=(1, 1))


def test_an_unknown_trait_names_the_nearest():
    with pytest.raises(PatternError, match=r"'typo' .*unknown trait of op.any_op 'layouts'; did you mean 'layout'"):

        @rewrite
        def typo(op, x):
            return op.any_op(layouts=True)(x)


def test_a_wildcard_is_for_rewrites_with_one_output(fusions):
    with pytest.raises(PatternError, match=r"'moved' .*op.any_op is for rewrites only"):

        @fxq.fusion
        def moved(op, x):
            return op.any_op(layout=True)(op.relu(x))

    assert "moved" not in FUSIONS
    with pytest.raises(PatternError, match=r"'pair' .*a pattern with op.any_op has one output"):

        @rewrite
        def pair(op, x):
            return op.relu(x), op.any_op(layout=True)(x)


def test_too_many_tensors():
    with pytest.raises(PatternError, match=r"op.relu takes 1 tensors \(x\), not 2"):

        @rewrite
        def two(op, x, y):
            return op.relu(x, y)


def test_captures_do_not_shadow_attributes_of_a_match():
    """A guard's `m.root` was the match's root, whatever the capture of that name had bound."""
    assert sorted(MATCH) == sorted({n for n in (*dir(Match), *Match.__annotations__) if not n.startswith("_")})
    for name in (*MATCH, "__class__"):
        body = {}
        exec(f"def hidden(op, x, {name}):\n    return op.mul(x, {name})", body)  # source_of needs no file
        with pytest.raises(PatternError, match=f"a capture cannot be called '{name}', .* Rename the parameter"):
            fusion(body["hidden"])
        assert "hidden" not in FUSIONS


def test_a_capture_that_is_not_used():
    with pytest.raises(PatternError, match="the capture 'spare' is not used"):

        @rewrite
        def unused(op, x, spare):
            return op.relu(x)


def test_a_value_that_is_not_used():
    with pytest.raises(PatternError, match=r"the value of op\.sigmoid is not used"):

        @rewrite
        def dead(op, x):
            op.sigmoid(x)
            return op.relu(x)


@pytest.mark.parametrize("name", ["", "class", 'a"b', "a\nb", "conv.in"])
def test_a_name_that_cannot_be_written_into_code(name):
    with pytest.raises(PatternError, match="cannot write code with this name; choose another"):
        fusion(name)(lambda op, x: op.relu(op.sigmoid(x)))


@pytest.mark.parametrize(
    "result", [lambda op, x: x, lambda op, x: 1, lambda op, x: None, lambda op, x: (op.relu(x), x)]
)
def test_a_pattern_returns_values_of_ops(result):
    with pytest.raises(PatternError, match="must return the value of an op"):
        rewrite("returns")(result)


def test_keyword_parameters_and_variants_must_agree():
    def pattern(op, x, *, act):
        return op[act](x)

    with pytest.raises(PatternError, match=r"keyword-only parameters are \['act'\], but there are variants for \[\]"):
        rewrite(pattern)
    with pytest.raises(PatternError, match=r"are \['act'\], but there are variants for \['act', 'layer'\]"):
        rewrite(act=("relu",), layer=("linear",))(pattern)


def test_an_unknown_variant_names_the_rule():
    with pytest.raises(PatternError, match=r"'p_rellu' .*unknown op 'rellu'; did you mean 'relu"):

        @rewrite("p_{act}", act=("relu", "rellu"))
        def p(op, x, *, act):
            return op[act](x)


# ---- the registered fusions


def test_a_fusion_is_registered_under_its_name(fusions):
    @fxq.fusion
    def tanh_of_relu(op, x):
        return op.tanh(op.relu(x))

    assert fusions["tanh_of_relu"] is tanh_of_relu[0]
    assert "tanh_of_relu" in fusions
    fusions.discard("tanh_of_relu")
    fusions.discard("tanh_of_relu")  # unknown names are ignored
    assert "tanh_of_relu" not in fusions


def test_a_rewrite_is_not_registered(fusions):
    @fxq.extend.rewrite
    def only_for_a_pass(op, x):
        return op.relu(x)

    assert "only_for_a_pass" not in fusions


def test_a_name_that_another_file_has_taken():
    with pytest.raises(
        PatternError, match=r"'conv2d_relu' \(rewriting/test_pattern.py:\d+\) is taken by patterns/fusions/conv.py:\d+"
    ):

        @fusion("conv2d_relu")
        def mine(op, x, w, b):
            return op.relu(op.conv2d(x, w, b))

    assert fxq.extend.FUSIONS["conv2d_relu"].source.startswith("patterns/fusions/conv.py")


def test_a_name_taken_registers_no_rule_of_the_family():
    with pytest.raises(PatternError, match="taken"):

        @fusion("conv2d_{act}", act=("tanh", "relu"))
        def mine(op, x, w, b, *, act):
            return op[act](op.conv2d(x, w, b))

    assert "conv2d_tanh" not in FUSIONS


def test_a_function_defined_anew_replaces_what_it_was(fusions):
    def define(inner):
        @fusion("again")
        def pattern(op, x):
            return op[inner](x)

        return pattern

    define("relu")
    second = define("tanh")
    assert fusions["again"] is second[0]
    assert sum(rule.name == "again" for rule in fusions) == 1


def test_another_function_of_the_same_file_may_not_take_a_name(fusions):
    @fusion("again")
    def first(op, x):
        return op.relu(x)

    with pytest.raises(PatternError, match=r"'again' .* is taken by .*test_pattern.py"):

        @fusion("again")
        def second(op, x):
            return op.tanh(x)

    assert fusions["again"] is first[0]


def test_largest_first_and_among_equals_the_latest(fusions):
    @fusion
    def small(op, x):
        return op.tanh(x)

    @fusion
    def first_pair(op, x):
        return op.tanh(op.relu(x))

    @fusion
    def second_pair(op, x):
        return op.tanh(op.sigmoid(x))

    order = [rule.name for rule in fusions.largest_first()]
    sizes = [rule.size for rule in fusions.largest_first()]
    assert sizes == sorted(sizes, reverse=True)
    assert order.index("conv2d_add_relu") < order.index("second_pair") < order.index("first_pair")
    assert order.index("first_pair") < order.index("conv2d_relu")  # the user's rules before the ones that ship
    assert order[-1] == "small"


def test_an_unknown_fusion_names_the_nearest():
    with pytest.raises(PatternError, match="unknown rule 'conv2d_rel'; did you mean 'conv2d_relu'"):
        FUSIONS["conv2d_rel"]
