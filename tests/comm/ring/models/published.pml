/* The double ring as OnePiece, section 6.1, publishes it, read as favourably as possible: writing the size (WL) is a
 * compare-and-swap on the busy bit, a producer looks past all slots that are written (step 4, in a loop), and one whose
 * WL fails gives up. A lock may be taken over while its owner lives: "the timer expires".
 *
 * Claims, one at a time:
 *   VISITED  Theorem 2: what was written (WL succeeded) is read by the consumer.
 *   ONE_LOST "obsolete updates can corrupt at most one subsequent data entry".
 *   WHOLE    what the consumer takes for valid, by the checksum of the header, is one producer's message.
 *   UNLOCKED a producer unlocks only its own lock.
 */
#ifndef TIMEOUTS
#define TIMEOUTS 1
#endif
#ifndef FIRST
#define FIRST 3 /* cells of producer 1's message; those of the others have LATER */
#endif
#ifndef LATER
#define LATER 1
#endif
#define PRODUCERS 3
#define SLOTS 4
#define CELLS 12
#define LENGTH(who) ((who) == 1 -> FIRST : LATER)
#define NEXT(at, length) ((at) + (length) < CELLS -> (at) + (length) : 0)

byte lock = 0;                        /* who has it */
byte tail_cell = 0, tail_slot = 0;    /* the header: both change at once */
byte size[SLOTS];                     /* 0: not busy */
byte cell[CELLS];                     /* who wrote it */
bool begins[CELLS];                   /* a message begins here: its header, with its checksum */
byte timeouts = 0, ended = 0, written = 0, valid = 0, damaged = 0;

proctype Producer(byte me) {
    byte at, slot, k;
    bool won;
    if
    :: atomic { lock == 0 -> lock = me }
    :: atomic { lock != 0 && timeouts < TIMEOUTS -> lock = me; timeouts++ }
    fi;
    atomic { /* GH: read the header, and move it past what is written */
        at = tail_cell; slot = tail_slot;
        do
        :: size[slot] != 0 -> at = NEXT(at, size[slot]); slot = (slot + 1) % SLOTS; tail_cell = at; tail_slot = slot
        :: else -> break
        od
    };
    do /* WB */
    :: k < LENGTH(me) -> atomic { cell[(at + k) % CELLS] = me; begins[(at + k) % CELLS] = (k == 0); k++ }
    :: else -> break
    od;
    atomic { /* WL */
        if
        :: size[slot] == 0 -> size[slot] = LENGTH(me); won = true; written++
        :: else -> won = false
        fi
    };
    if
    :: won ->
        atomic { tail_cell = NEXT(at, LENGTH(me)); tail_slot = (slot + 1) % SLOTS }; /* UH */
        atomic {
#ifdef UNLOCKED
            assert(lock == me);
#endif
            lock = 0
        }
    :: else -> skip
    fi;
    ended++
}

active proctype Consumer() {
    byte at = 0, slot = 0, length, k, who;
    bool good;
    do
    :: atomic { size[slot] != 0 -> length = size[slot]; k = 1 };
        atomic { who = cell[at]; good = (who != 0 && begins[at] && LENGTH(who) == length) }; /* header and checksum */
        do
        :: good && k < length -> atomic {
#ifdef WHOLE
                assert(cell[(at + k) % CELLS] == who && !begins[(at + k) % CELLS]);
#endif
#ifdef ONE_LOST
                if :: cell[(at + k) % CELLS] != who || begins[(at + k) % CELLS] -> good = false :: else -> skip fi;
#endif
                k++
            }
        :: else -> break
        od;
        if :: good -> valid++ :: else -> damaged++ fi;
#ifdef ONE_LOST
        assert(damaged <= timeouts);
#endif
        size[slot] = 0;
        at = NEXT(at, length);
        slot = (slot + 1) % SLOTS
    :: atomic { ended == PRODUCERS && size[slot] == 0 -> break }
    od;
#ifdef VISITED
    assert(valid + damaged == written)
#endif
}

init { atomic { byte who = 1; do :: who <= PRODUCERS -> run Producer(who); who++ :: else -> break od } }
