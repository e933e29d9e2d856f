"""Which rule of the policy holds for which module, and which parameters stay float32.

Found when a tree of modules is first seen, and kept beside the modules by identity: nothing is put
on them, and they may define ``__eq__``.
"""

from __future__ import annotations

import bisect
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from .naming import Named, Patterns, children, collect_names, outermost_owners
from .traced import Parts, is_never_called

if TYPE_CHECKING:
    from .session import Session

Module = torch.nn.Module
Candidates = tuple[int, ...]
"""Rules by index, in the order in which they are asked: the first that is in its steps holds."""
Entry = str | Candidates | None
"""What holds for a module: a precision at all times, rules with steps, or nothing of its own."""
UNKNOWN: Candidates = (-1,)
"""In the place of an entry: a module that was never seen."""
_COVERED = -2
"""In the place of a rule's index: this module owns a parameter whose ops stay float32."""
_SEARCHES = 16
"""How many roots of one class are worth a look at all objects, for who owns them."""
_MAX_COMPLAINTS = 8


def _nothing() -> None:
    return None


class _Local(threading.local):
    """What one thread is in: a root, and whether its tree may be looked through once more."""

    root: weakref.ref[Module] | None = None
    may_look: bool = False


class Rules:
    """The module and parameter rules of one session, and what they mean for the modules seen."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.table: dict[int, Entry] = {}
        """By a module's id. Ids in here are those of living objects (`remember`)."""
        self.last_region: dict[int, str] = {}
        """By the id of a module, or of the class of one that nobody knows: where it last ran."""
        self.phase = "0"
        """Changes when a rule's steps begin or end; compiled code guards on it."""
        self.parts = Parts()
        self._rules = session.policy.modules
        self._modules = Patterns(self._rules)
        self._parameters = Patterns(session.policy.parameters)
        self.ask_names = self._modules.ask_names or self._parameters.ask_names
        borders = {step for rule in self._rules for step in (rule.first, rule.last)}
        self._borders = sorted(borders - {0, float("inf")})
        self._local = _Local()
        self._searches: dict[str, int] = {}
        self.has_learned = False
        self._has_looked_for_typos = False
        self._living: dict[int, weakref.ref[Any]] = {}
        self._names: dict[int, set[str]] = {}
        self._own: dict[int, Candidates] = {}
        self._traced: dict[int, Candidates] = {}
        self._by_class: dict[int, Candidates] = {}
        self._roots: dict[int, bool] = {}
        self._tops: dict[int, list[weakref.ref[Module]]] = {}
        self._slots: dict[int, list[str]] = {}
        self._covered: dict[int, bool] = {}
        self._demoted: dict[int, bool] = {}
        self._overlaid: dict[int, Entry] = {}
        self._by_id: list[dict[int, Any]] = [
            self._demoted,
            self._overlaid,
            self.table,
            self.last_region,
            self._names,
            self._own,
            self._traced,
            self._by_class,
            *self.parts.tables,
            self._roots,
            self._tops,
            self._slots,
            self._covered,
        ]

    # Asked on the way into modules

    def of_root(self, root: Module) -> Entry:
        """The entry of the module whose call has just opened a region."""
        if id(root) not in self._roots:
            self.learn(root)
        for key, slots in list(self._slots.items()):
            module = self._living.get(key, _nothing)()
            if module is not None:
                self._cover(module, slots)  # a parameter may have been replaced
        self._local.root = self._living[id(root)]
        self._local.may_look = True
        if self._borders or not self._has_looked_for_typos:
            self.step_ended()
        self.parts.is_mixed = id(root) in self.parts.mixed
        return self.table[id(root)]

    def of_stranger(self, module: Module) -> Entry:
        """The entry of a module that is called inside a root and was never seen.

        Once in a region the root's tree is looked through for it. What is in no tree (made during
        the call, or hidden in a list) starts names of its own.
        """
        if not self._local.may_look:
            return self.of_unseen(type(module))
        self._local.may_look = False
        self._learn_root()
        if id(module) not in self.table:
            self._assign(_named_below(module, but_not=self.table), [module], {})
        return self.table[id(module)]

    def of_unseen(self, cls: type) -> Entry:
        """The entry of a module of which nothing is known but the class."""
        return self._entry(self.of_class(cls))

    def in_force(self, candidates: Candidates) -> str:
        """The precision that the first rule in its steps asks for, or an empty word."""
        if not candidates:
            return ""
        steps = self.steps()
        for index in candidates:
            if index == _COVERED:
                return "float32"
            rule = self._rules[index]
            if rule.first <= steps < rule.last:
                return rule.precision
        return ""

    def covers(self, tensor: torch.Tensor) -> bool:
        """Whether this is a parameter of a parameter rule, or a view of one."""
        if id(tensor) in self._covered:
            return True
        base = tensor._base
        return base is not None and id(base) in self._covered

    def steps(self) -> int:
        """How many steps the optimizers have ended, skipped ones included; no device is asked."""
        scale = self.session.loss_scale
        return self.session.counts.steps + scale.taken + scale.skipped + len(scale._pending)

    def step_ended(self) -> None:
        """Note that steps may have gone by; after the first one, say which rules match nothing."""
        steps = self.steps()
        self.phase = str(bisect.bisect_right(self._borders, steps))
        if steps and not self._has_looked_for_typos:
            self.check_matches()

    def check_matches(self) -> None:
        """Name the rules that match nothing in any model that ran, and what they may mean; once."""
        if self._has_looked_for_typos or not self.has_learned:
            return
        self._has_looked_for_typos = True
        missing = [
            (patterns, index)
            for patterns in (self._modules, self._parameters)
            for index in patterns.unmatched()
        ]
        for patterns, index in missing[:_MAX_COMPLAINTS]:
            self.session.speech.notice(f"autoamp: {patterns.complaint(index)}")
        if more := missing[_MAX_COMPLAINTS:]:
            self.session.speech.notice(f"autoamp: {len(more)} more rules match nothing")

    def close(self) -> None:
        """The end: what was never said is said, and Dynamo is as it was."""
        self.check_matches()
        self.parts.close()

    # Modules that half precision breaks

    def new_table(self) -> dict[int, Any]:
        """A dict by the ids of modules, whose entries go when those die; they are remembered."""
        self._by_id.append({})
        return self._by_id[-1]

    def living(self, key: int) -> Module | None:
        """The module with this id, if it was remembered and lives."""
        return self._living.get(key, _nothing)()

    def demoted(self, module: Module) -> bool | None:
        """Whether a module has been demoted (not None), and with all below it."""
        return self._demoted.get(id(module))

    def demote(self, module: Module, below: bool | None) -> None:
        """Make a module a float32 island, with all below it or not; None: it is as it was."""
        self.remember(module)
        self._lift()
        self._demoted.pop(id(module), None)
        if below is not None:
            self._demoted[id(module)] = below
        self._overlay()

    def _overlay(self) -> None:
        """Put the entries of demoted modules over those that the rules give."""
        for key, below in self._demoted.items():
            module = self._living[key]()
            if module is not None:
                self._cover_entry(key, "float32")
                for child in () if below else _called_children(module):
                    if id(child) not in self._demoted and self.table.get(id(child)) is None:
                        self.remember(child)
                        self._cover_entry(id(child), "lower")

    def _cover_entry(self, key: int, entry: Entry) -> None:
        self._overlaid.setdefault(key, self.table.get(key, UNKNOWN))
        self.table[key] = entry

    def _lift(self) -> None:
        for key, entry in self._overlaid.items():
            if entry is UNKNOWN:
                self.table.pop(key, None)
            else:
                self.table[key] = entry
        self._overlaid.clear()

    # Asked while code is traced

    def of_class(self, cls: type) -> Candidates:
        """The candidates of a module of which nothing is known but the class."""
        candidates = self._by_class.get(id(cls))
        if candidates is None:
            self.remember(cls)
            candidates = self._until_untimed(self._modules.of_class(cls))
            self._by_class[id(cls)] = candidates
        return candidates

    def of_traced(self, module: Module) -> Candidates:
        """The candidates of one module inside traced code.

        Fewer than in `table`: what a caller's island brings along is in force anyway.
        """
        return self._traced.get(id(module), self.of_class(type(module)))

    # Learning a tree

    def learn(self, root: Module) -> None:
        """Find the rules of a root, of everything below it, and of what else holds any of that.

        Names start from the outermost owner: a script that calls ``vae.encoder`` and
        ``vae.decoder`` never calls ``vae``, for which its policy was written. Only where the owner
        was never called do they start from the root, too.
        """
        self.has_learned = True
        self.remember(root)
        owners = self._known_tops(id(root)) or self._owners(root)
        self._roots[id(root)] = not any(
            id(owner) in self._roots for owner in owners if owner is not root
        )
        found: Named = {}
        started: dict[int, Module] = {}
        bases = [*owners, *([root] if self._roots[id(root)] else [])]
        while bases:
            base = bases.pop()
            if id(base) not in started:
                started[id(base)] = base
                known = set(found)
                collect_names(base, found)
                for key in found.keys() - known:
                    bases += self._known_tops(key)
                    if self._roots.get(key):
                        bases.append(found[key][0])
        held = {id(child) for module, _ in found.values() for _, child in children(module)}
        tops = [base for key, base in started.items() if key not in held]
        self._assign(found, tops or [root], started)

    def learn_traced(self, root: Module) -> None:
        """The same for a root whose calls are traced, each root's by itself."""
        self.learn(root)
        self.parts.raise_limits(len(self._roots))

    def learn_again(self) -> None:
        """Look at the root once more that eager code is in: code is about to be traced there."""
        self._learn_root()
        if self.parts.inside not in self.parts.plain:
            self.parts.is_mixed = self.parts.is_mixed or self.parts.inside != 0

    def _learn_root(self) -> None:
        reference = self._local.root
        root = reference() if reference is not None else None
        if root is not None:
            self.learn(root)

    def _known_tops(self, key: int) -> list[Module]:
        return [top for reference in self._tops.get(key, ()) if (top := reference()) is not None]

    def _owners(self, root: Module) -> list[Module]:
        kind = f"{type(root).__module__}.{type(root).__qualname__}"
        searches = self._searches.get(kind, 0)
        if searches == _SEARCHES or not self.ask_names:
            return [root]
        self._searches[kind] = searches + 1
        return outermost_owners(root)

    def _assign(self, found: Named, tops: list[Module], bases: dict[int, Module]) -> None:
        self._lift()
        references = [self.remember(top) for top in tops]
        for key, (module, names) in found.items():
            self.remember(module)
            self._tops[key] = references
            known = self._names.setdefault(key, set())
            if key not in self._own or not names <= known:
                known |= names
                indices = self._modules.of_names(known) | set(self.of_class(type(module)))
                self._own[key] = self._until_untimed(sorted(indices))
            self._find_parameters(module, known)
        everywhere: dict[int, set[Candidates]] = {}
        uncalled: dict[int, set[Candidates]] = {}
        for base in (*tops, *bases.values()):
            if id(base) not in everywhere:  # but for circles, that is what no other holds
                self._pass_down(base, (), everywhere, _always)
                self._pass_down(base, (), uncalled, is_never_called)
        for key, (module, _) in found.items():
            self.table[key] = self._entry(self._together(key, everywhere))
            self._trace(module, self._together(key, uncalled))
        self.parts.sort(found)
        for key in found.keys() & self.parts.plain.keys():
            if self.table[key] is None:
                self.table[key] = ()
        self._overlay()

    def _pass_down(
        self,
        module: Module,
        above: Candidates,
        passed: dict[int, set[Candidates]],
        passes: Callable[[Module], bool],
    ) -> None:
        """What holds for a module holds below it, after the rules that are there themselves."""
        here = self._until_untimed(dict.fromkeys((*self._own.get(id(module), ()), *above)))
        known = passed.setdefault(id(module), set())
        if here not in known:
            known.add(here)
            for _, child in children(module):
                self._pass_down(child, here if passes(module) else (), passed, passes)

    def _together(self, key: int, passed: dict[int, set[Candidates]]) -> Candidates:
        """The candidates of a module by all ways that lead to it: as all of its names count."""
        ways = passed.get(key, set())
        if len(ways) == 1:
            return next(iter(ways))
        own = self._own[key]
        return self._until_untimed(dict.fromkeys((*own, *sorted(set().union(*ways)))))

    def _until_untimed(self, indices: Iterable[int]) -> Candidates:
        candidates: list[int] = []
        for index in indices:
            candidates.append(index)
            if self._is_untimed(index):
                break
        return tuple(candidates)

    def _is_untimed(self, index: int) -> bool:
        return self._rules[index].first == 0 and self._rules[index].last == float("inf")

    def _entry(self, candidates: Candidates) -> Entry:
        if not candidates:
            return None
        if self._is_untimed(candidates[0]):
            return self._rules[candidates[0]].precision
        return candidates

    def _trace(self, module: Module, candidates: Candidates) -> None:
        """Note what holds for a module in traced code, and whether its class alone tells it.

        Tensors have other identities there: who owns a parameter of a parameter rule is an island.
        """
        if id(module) in self._slots:
            candidates = (_COVERED,)
        self._traced[id(module)] = candidates
        if candidates != self.of_class(type(module)):
            self.parts.note_special(module)

    def _find_parameters(self, module: Module, names: set[str]) -> None:
        if not self._parameters.ask_names:
            return
        slots = [
            slot
            for slot in module.__dict__.get("_parameters", ())
            if self._parameters.of_names(f"{name}.{slot}" if name else slot for name in names)
        ]
        if slots:
            self._slots[id(module)] = slots
            self._cover(module, slots)

    def _cover(self, module: Module, slots: list[str]) -> None:
        for slot in slots:
            parameter = module._parameters.get(slot)
            if parameter is not None and id(parameter) not in self._covered:
                self.remember(parameter)
                self._covered[id(parameter)] = True

    def remember(self, thing: Any) -> weakref.ref[Any]:
        """Have everything about `thing` forgotten when it dies: another may get its id."""
        key = id(thing)
        reference = self._living.get(key)
        if reference is not None and reference() is None:
            self._forget(key, reference)
            reference = None
        if reference is None:
            reference = weakref.ref(thing, functools.partial(self._forget, key))
            self._living[key] = reference
        return reference

    def _forget(self, key: int, reference: weakref.ref[Any]) -> None:
        if self._living.get(key) is reference:
            del self._living[key]
            for table in self._by_id:
                table.pop(key, None)


def _named_below(module: Module, but_not: dict[int, Entry]) -> Named:
    found: Named = {}
    collect_names(module, found)
    return {key: value for key, value in found.items() if key not in but_not}


def _called_children(module: Module) -> Iterator[Module]:
    """The parts of a module that it may call: of lists of modules, what they hold."""
    for _, child in children(module):
        if is_never_called(child):
            yield from _called_children(child)
        else:
            yield child


def _always(module: Module) -> bool:
    return True
