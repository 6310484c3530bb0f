/* The ring of src/tilework/comm/ring: no lock, the word of a slot decides. Names as in produce.py and consume.py.
 *
 * Producers may be arbitrarily slow, or end anywhere (END_ANYWHERE). Entries are abandoned by the consumer and by a peer
 * at any time, at most ABANDONS of them. A fence is one step: from then on the owner's writes have no effect.
 *
 * Mistakes, one at a time: PLAIN_COMMIT, NO_GENERATION, NO_FENCE. Where a fence cannot be trusted (NO_FENCE, MAY_LOSE) a
 * checksum of the payload still lets no wrong message pass; one of the header alone does (HEADER_ONLY).
 */
#ifndef PRODUCERS
#define PRODUCERS 2
#endif
#ifndef MESSAGES
#define MESSAGES 2
#endif
#define SLOTS 2 /* The consumer looks again at the entry at the head alone: the other one comes there. */
#ifndef CELLS
#define CELLS 4
#endif
#ifndef ABANDONS
#define ABANDONS 1
#endif
#ifndef FIRST
#define FIRST 3 /* cells of producer 1's messages; those of the others have LATER */
#endif
#ifndef LATER
#define LATER 1
#endif
#define LENGTH(who) ((who) == 1 -> FIRST : LATER)
#ifdef NO_GENERATION
#define LAP(number) 0
#else
#define LAP(number) ((number) / SLOTS)
#endif
#define AT(number) ((number) % SLOTS)
#define CURRENT(number) (generation[AT(number)] == LAP(number))
#define MARK(who, number) (16 * (number) + (who)) /* what a message writes into its cells */
#define BY(mark) ((mark) % 16)
#define OF(mark) ((mark) / 16)

mtype = { EMPTY, RESERVED, READY, PAD, ABANDONED };
mtype state[SLOTS] = EMPTY;           /* state, generation, owner, units: one word, so they change in one step */
byte generation[SLOTS], owner[SLOTS], units[SLOTS];
byte head_slot = 0, head_cell = 0;    /* one word */
byte hint_slot = 0, hint_cell = 0;    /* one word */
byte cell[CELLS];
bool fenced[PRODUCERS + 1], over[PRODUCERS + 1];
byte last[PRODUCERS + 1];             /* the last message of each that was delivered */
byte ended = 0, committed = 0, delivered = 0, lost = 0, abandoned = 0;

proctype Producer(byte me) {
    byte slot, at, saw_slot, saw_cell, saw_head, saw_head_cell, word_state, length, k, message = 1;
    do
    :: message > MESSAGES || fenced[me] -> break
#ifdef END_ANYWHERE
    :: message <= MESSAGES && !fenced[me] -> break
#endif
    :: message <= MESSAGES && !fenced[me] ->
again:
        atomic { saw_head = head_slot; saw_head_cell = head_cell };
        atomic {
            saw_slot = hint_slot; saw_cell = hint_cell; slot = saw_slot; at = saw_cell;
            if :: slot < saw_head -> slot = saw_head; at = saw_head_cell :: else -> skip fi
        };
        do /* walk */
        :: atomic { slot - saw_head < SLOTS && CURRENT(slot) && state[AT(slot)] != EMPTY ->
            at = at + units[AT(slot)]; slot++ }
        :: atomic { slot - saw_head < SLOTS && CURRENT(slot) && state[AT(slot)] == EMPTY -> break }
        :: atomic { slot - saw_head >= SLOTS -> goto no_room }
        :: atomic { slot - saw_head < SLOTS && !CURRENT(slot) -> goto differs }
        od;
        atomic {
            length = LENGTH(me); word_state = RESERVED;
            if :: at % CELLS + length > CELLS -> length = CELLS - at % CELLS; word_state = PAD :: else -> skip fi;
            if
            :: at + length - saw_head_cell > CELLS -> goto no_room
            :: else -> skip
            fi;
            if
            :: CURRENT(slot) && state[AT(slot)] == EMPTY && !fenced[me] ->
                state[AT(slot)] = word_state; owner[AT(slot)] = me; units[AT(slot)] = length
            :: else -> goto again
            fi
        };
#ifdef END_ANYWHERE
        if :: goto stop :: skip fi;
#endif
        atomic {
            if
            :: hint_slot == saw_slot && hint_cell == saw_cell -> hint_slot = slot + 1; hint_cell = at + length
            :: else -> skip
            fi
        };
        if :: word_state == PAD -> goto again :: else -> skip fi;
        k = 0;
        do
        :: atomic { k < length -> if :: !fenced[me] -> cell[at % CELLS + k] = MARK(me, message) :: else -> skip fi; k++ }
#ifdef END_ANYWHERE
        :: k < length -> goto stop
#endif
        :: k == length -> break
        od;
        atomic {
            if
#ifdef PLAIN_COMMIT
            :: !fenced[me] -> state[AT(slot)] = READY; generation[AT(slot)] = LAP(slot); owner[AT(slot)] = me;
                units[AT(slot)] = length; committed++
#else
            :: CURRENT(slot) && state[AT(slot)] == RESERVED && owner[AT(slot)] == me && !fenced[me] ->
                state[AT(slot)] = READY; committed++
#endif
            :: else ->
                if :: !fenced[me] -> lost++ :: else -> skip fi; /* A fenced producer learns nothing any more. */
                if /* The owner says itself that it writes no more. */
                :: CURRENT(slot) && state[AT(slot)] == ABANDONED && owner[AT(slot)] == me && !fenced[me] ->
                    state[AT(slot)] = PAD
                :: else -> skip
                fi
            fi
        };
        goto no_room;
differs:
        if :: head_slot != saw_head -> goto again :: else -> skip fi;
no_room:
        message++
    od;
stop:
    atomic { over[me] = true; ended++ }
}

active proctype Consumer() {
    byte scan = 0, scan_cell = 0, slot, at, k, length, mark;
    bool decided, good;
loop:
    do
    /* look again at an entry that was stepped over (SLOTS are few: any of them) */
    :: scan > head_slot && state[AT(head_slot)] == READY && CURRENT(head_slot) ->
        slot = head_slot; at = head_cell; goto deliver
    /* look at the next one, and step over it if it is not committed */
    :: scan - head_slot < SLOTS && CURRENT(scan) && state[AT(scan)] != EMPTY ->
        if
        :: state[AT(scan)] == READY ->
            /* An earlier entry of the same owner that was stepped over comes first. */
            decided = !(scan > head_slot && CURRENT(head_slot) && state[AT(head_slot)] != PAD &&
                        owner[AT(head_slot)] == owner[AT(scan)]);
            if
            :: decided -> slot = scan; at = scan_cell; scan_cell = scan_cell + units[AT(scan)]; scan++; goto deliver
            :: else -> skip
            fi
        :: else -> scan_cell = scan_cell + units[AT(scan)]; scan++
        fi
    /* advance: the head first, then the slot */
    :: scan > head_slot && CURRENT(head_slot) && state[AT(head_slot)] == PAD ->
        atomic { slot = head_slot; head_cell = head_cell + units[AT(slot)]; head_slot++ };
        atomic { state[AT(slot)] = EMPTY; generation[AT(slot)] = LAP(slot + SLOTS); owner[AT(slot)] = 0; units[AT(slot)] = 0 }
    /* abandon */
    :: atomic { CURRENT(head_slot) && state[AT(head_slot)] == RESERVED && scan > head_slot && abandoned < ABANDONS ->
        state[AT(head_slot)] = ABANDONED; abandoned++ }
    /* fence: of an abandoned entry, or of a producer that has ended; afterwards of what else it had reserved */
    :: scan > head_slot && CURRENT(head_slot) && state[AT(head_slot)] == ABANDONED -> goto fence
    :: scan > head_slot && CURRENT(head_slot) && state[AT(head_slot)] == RESERVED &&
        (over[owner[AT(head_slot)]] || fenced[owner[AT(head_slot)]]) -> goto fence
    :: atomic { ended == PRODUCERS && scan == head_slot && (!CURRENT(scan) || state[AT(scan)] == EMPTY) -> break }
    od;
    goto done;
deliver:
    length = units[AT(slot)]; mark = cell[at % CELLS]; good = (BY(mark) == owner[AT(slot)]); k = 0;
    do
    :: good && k < length ->
        if
        :: cell[(at + k) % CELLS] == mark -> k++
#ifdef HEADER_ONLY
        :: else -> assert(false) /* a message is delivered that was never sent */
#else
        :: else -> good = false
#endif
        fi
    :: else -> break
    od;
    if
    :: good -> assert(OF(mark) > last[BY(mark)]); last[BY(mark)] = OF(mark); delivered++
#ifdef MAY_LOSE
    :: else -> skip
#else
    :: else -> assert(false) /* a committed message arrives damaged */
#endif
    fi;
    state[AT(slot)] = PAD;
    goto loop;
fence:
#ifndef NO_FENCE
    fenced[owner[AT(head_slot)]] = true;
#endif
    state[AT(head_slot)] = PAD;
    goto loop;
done:
#ifndef MAY_LOSE
    assert(delivered == committed);
    assert(lost <= abandoned)
#else
    skip
#endif
}

#if ABANDONS
/* Another producer abandons what it finds reserved. */
active proctype Peer() {
    byte slot = 0;
    do
    :: slot < SLOTS ->
        if
        :: atomic { state[slot] == RESERVED && abandoned < ABANDONS -> state[slot] = ABANDONED; abandoned++ }
        :: true -> skip
        fi;
        slot++
    :: else -> break
    od
}
#endif

init { atomic { byte who = 1; do :: who <= PRODUCERS -> run Producer(who); who++ :: else -> break od } }
