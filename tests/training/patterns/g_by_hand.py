"""Loss scaling written by hand, for what `torch.amp.GradScaler` cannot do.

Gradients carry the scale inside `backward` and nowhere else, so that a script may do with them what
it likes, as often as it likes. A step whose gradients are not finite is skipped and costs one
halving of the scale that they were computed with; `interval` steps in a row double it.
"""


class Scale:
    def __init__(self, init, interval, enabled):
        self.value = init if enabled else 1.0
        self.interval = interval
        self.enabled = enabled
        self.good_steps = 0

    def backward(self, loss, parameters, **arguments):
        parameters = list(parameters)
        for p in parameters:
            if p.grad is not None:
                p.grad.mul_(self.value)
        (loss * self.value).backward(**arguments)
        for p in parameters:
            if p.grad is not None:
                p.grad.div_(self.value)
        return self.value

    def step(self, optimizer, ran_with=None):
        ran_with = self.value if ran_with is None else ran_with
        gradients = [
            p.grad.coalesce().values() if p.grad.is_sparse else p.grad
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        if not self.enabled:
            optimizer.step()
        elif all(g.isfinite().all() for g in gradients):
            optimizer.step()
            self.good_steps += 1
            if self.good_steps == self.interval:
                self.value, self.good_steps = self.value * 2, 0
        else:
            self.value, self.good_steps = min(self.value, ran_with / 2), 0
