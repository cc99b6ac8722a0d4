"""Sessions and namespaces: who is here, and in which layouts.

Rules: when a session ends its leases and keys are free at once; the filling slots of a mapped writer wait for the end
of its process. A session of which something waits is kept, ended, until then.
Must not know: how leases and reservations end (acquiring and filling do).
"""

from __future__ import annotations

from prefixcache.core.acquiring import Acquiring
from prefixcache.core.commands import Command, NamespaceForgotten, NamespaceReady, SessionClosed, SessionReady
from prefixcache.core.events import NamespaceOpened, ProcessExited, SessionEnded, SessionOpened
from prefixcache.core.filling import Filling
from prefixcache.core.gpu import GpuTier
from prefixcache.core.namespaces import Namespace
from prefixcache.core.reasons import Kind, Miss, Refusal
from prefixcache.core.spec import NamespaceSpec, SpecError
from prefixcache.core.state import Session, State

FINGERPRINT_BYTES = 32


class Sessions:
    """Handlers of the session and namespace events."""

    def __init__(self, state: State, acquiring: Acquiring, filling: Filling) -> None:
        self.state = state
        self.acquiring = acquiring
        self.filling = filling

    def open(self, event: SessionOpened, out: list[Command]) -> None:
        state = self.state
        if not state.good_id(event.session, out):
            return
        known = state.sessions.get(event.session)
        if known is not None:
            if known.ended or known.can_map is not event.can_map or known.gpus != self._gpus(event):
                text = "this session id is in use or has ended"
                state.refuse(out, Kind.ALREADY_EXISTS, Refusal.SESSION_EXISTS, text, event.session)
                return
        elif len(state.sessions) >= state.limits.max_sessions:
            text = f"at most {state.limits.max_sessions} sessions"
            state.refuse(out, Kind.RESOURCE_EXHAUSTED, Refusal.TOO_MANY, text, event.session)
            return
        else:
            state.sessions[event.session] = Session(event.session, event.can_map, event.name, self._gpus(event))
        out.append(SessionReady(event.session))

    def _gpus(self, event: SessionOpened) -> tuple[GpuTier, ...]:
        gpus = self.state.gpus
        return tuple(gpus[pool] for pool in event.gpu_pools if pool in gpus)

    def end(self, event: SessionEnded, out: list[Command]) -> None:
        session = self.state.live_session(event.session, out, event.session)
        if session is None:
            return
        self._end(session, out)
        held = sum(len(reservation.held_slots()) for reservation in session.reservations.values())
        if not session.reservations:
            del self.state.sessions[session.session]
        out.append(SessionClosed(session.session, held))

    def exit(self, event: ProcessExited, out: list[Command]) -> None:
        state = self.state
        session = state.sessions.get(event.session)
        if session is None:
            text = "no such session, or nothing of it waits"
            state.refuse(out, Kind.NOT_FOUND, Refusal.SESSION_UNKNOWN, text, event.session)
            return
        if not session.ended:
            self._end(session, out)
        for reservation in list(session.reservations.values()):
            self.filling.writer_gone(reservation, session.session, out)
        state.sessions.pop(session.session, None)  # gone already with its last reservation
        out.append(SessionClosed(session.session, 0))

    def open_namespace(self, event: NamespaceOpened, out: list[Command]) -> None:
        state = self.state
        known = state.by_fingerprint.get(event.fingerprint)
        if known is not None:
            if known.spec != event.spec or not known.learn_layers(event.spec):
                text = "this fingerprint is open with another layout"
                state.refuse(out, Kind.FAILED_PRECONDITION, Refusal.NAMESPACE_MISMATCH, text)
            else:
                out.append(NamespaceReady(known.number, known.strides))
            return
        if self._may_open(event, out):
            space = self.add_namespace(event.namespace, event.fingerprint, event.spec)
            out.append(NamespaceReady(space.number, space.strides))

    def add_namespace(self, number: int, fingerprint: bytes, spec: NamespaceSpec) -> Namespace:
        """Registers a checked, new namespace."""
        state = self.state
        strides = tuple(part.stride_bytes for part in spec.parts)
        space = Namespace(number, fingerprint, spec, state.policy_for(strides), state.stats.open_ledger(number))
        if state.config.disk is not None:
            space.use_disk()
        if state.gpus and space.is_plain:
            space.use_gpus(state.gpus.values())
        state.namespaces[number] = space
        state.by_fingerprint[fingerprint] = space
        return space

    def _may_open(self, event: NamespaceOpened, out: list[Command]) -> bool:
        state = self.state
        host = state.host
        if len(event.fingerprint) != FINGERPRINT_BYTES:
            text = f"a fingerprint is {FINGERPRINT_BYTES} bytes"
            state.refuse(out, Kind.INVALID_ARGUMENT, Refusal.ARGUMENT_INVALID, text)
            return False
        try:
            event.spec.validate()
        except SpecError as error:
            state.refuse(out, Kind.INVALID_ARGUMENT, Refusal.SPEC_INVALID, str(error))
            return False
        largest = max(part.stride_bytes for part in event.spec.parts)
        whole = sum(part.stride_bytes for part in event.spec.parts)
        if largest > min(host.spec.slab_bytes, host.spec.size_bytes) or whole > host.spec.size_bytes:
            text = f"a part of {largest} bytes does not fit a slab of {host.spec.slab_bytes}, or a block the pool"
            state.refuse(out, Kind.RESOURCE_EXHAUSTED, Refusal.BLOCK_TOO_LARGE, text)
        elif event.namespace in state.namespaces:
            text = f"namespace id {event.namespace} has another fingerprint"
            state.refuse(out, Kind.ALREADY_EXISTS, Refusal.NAMESPACE_TAKEN, text)
        elif len(state.namespaces) >= state.limits.max_namespaces and not self._forget_empty(out):
            text = f"at most {state.limits.max_namespaces} namespaces"
            state.refuse(out, Kind.RESOURCE_EXHAUSTED, Refusal.TOO_MANY, text)
        else:
            return True
        return False

    def _forget_empty(self, out: list[Command]) -> bool:
        """Makes room for a namespace by forgetting one that holds nothing (an old weights epoch, say)."""
        state = self.state
        busy = {reservation.space for reservation in state.reservations.values()}
        for space in state.namespaces.values():
            if not space.table.used and space not in busy and not space.prefix_pins:
                del state.namespaces[space.number]
                del state.by_fingerprint[space.fingerprint]
                if all(other.policy is not space.policy for other in state.namespaces.values()):
                    del state.policies[tuple(sorted(space.strides))]
                for tier, _ in space.copies:
                    tier.forget(space)
                state.stats.forget_ledger(space.number)
                out.append(NamespaceForgotten(space.number))
                return True
        return False

    def _end(self, session: Session, out: list[Command]) -> None:
        """Leases and keys are free; what a mapped writer fills is quarantined."""
        for lease in list(session.leases.values()):
            self.acquiring.end_unreleased(lease, Miss.SESSION_ENDED, out)
        for reservation in list(session.reservations.values()):
            if not reservation.expired:
                self.filling.run_out(reservation, out, expired=False)
        session.ended = True
