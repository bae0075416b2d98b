"""The plans that GPU calls leave behind, for tests that look at them or want none."""

from fa_cupy.gpu import (
    attention,
    attention_backward,
    attention_backward_plan,
    causal_product,
    causal_product_plan,
    plan,
)

TABLES = (
    attention._calls,
    plan._plans,
    attention_backward._calls,
    attention_backward_plan._plans,
    causal_product._calls,
    causal_product._plans,
    causal_product_plan._joint,
)


def forget():
    """The next call of each kind makes its plan anew."""
    for table in TABLES:
        table.clear()


def gradients_by_products(monkeypatch):
    """Products of cuBLAS answer the following calls for gradients."""
    forget()
    monkeypatch.setattr(attention_backward_plan, "plan_for", lambda *args: None)
