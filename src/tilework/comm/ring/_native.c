/* The verbs on shared memory, and the steps of produce.py and consume.py in one call each.
 *
 * Memory order. What others may rely on, on x86 and on ARM:
 *   - A producer writes the bytes of an entry, then sets its slot READY with a compare-and-swap that releases; the
 *     consumer reads the slot's word with an acquire, then the bytes. So who sees READY sees the bytes.
 *   - The consumer reads the bytes, then stores the head with a release; a producer reads the head with an acquire,
 *     then writes. So no byte is written while it is read. The slot is emptied after that, with a release.
 *   - The bell is Dekker's pattern: the producer sets READY and reads the bell, the consumer sets the bell and reads
 *     the slot, each with a full fence between. So not both can miss the other. On x86 the fence is needed for the
 *     consumer (a store, then a load); a compare-and-swap is one itself. ARM needs both.
 *   - A word is 8 bytes at a multiple of 8 and is read and written at once. On x86 all this but the fences is what
 *     the processor does anyway; on ARM the acquires and releases are instructions of their own.
 * Bytes of entries are copied by memcpy. They are written at the same time only if the memory is damaged; then the
 * checksum tells, and all lengths are read once, checked, and used from the copy.
 */
/* One build serves all versions. A format with '#' does not: compiled by 3.13 or later it is an error in 3.11 and 3.12. */
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the words of a ring are little-endian"
#endif

enum { UNIT = 64, PAGE = 4096, HEAD = 0, HINT = UNIT, BELL = 2 * UNIT, FIRST_SLOT = 3 * UNIT, PROLOGUE = 24 };
enum { EMPTY, RESERVED, READY, PAD, ABANDONED };
enum { SENT, FULL, LOST, BROKEN };
enum { COPY_WITHOUT_GIL = 32768, PIECES = 64, OWNERS = 1024 };

static PyObject *corrupted; /* tilework.comm.ring.errors.RingCorrupted */

/* ---- CRC32C ---------------------------------------------------------------------------------------------------- */

enum { LONG = 2048, SHORT = 256 };
static uint32_t table[8][256];       /* by byte, for eight bytes at once */
static uint32_t after_long[4][256];  /* what LONG zero bytes make of a value, by its bytes */
static uint32_t after_short[4][256];

static void fill_shift(uint32_t shift[4][256], int zeros) {
    uint32_t of_bit[32];
    for (int bit = 0; bit < 32; bit++) {
        uint32_t value = 1u << bit;
        for (int i = 0; i < zeros; i++) value = value >> 8 ^ table[0][value & 0xFF];
        of_bit[bit] = value;
    }
    for (int byte = 0; byte < 4; byte++)
        for (int i = 0; i < 256; i++) {
            uint32_t value = 0;
            for (int bit = 0; bit < 8; bit++)
                if (i >> bit & 1) value ^= of_bit[8 * byte + bit];
            shift[byte][i] = value;
        }
}

static void fill_tables(void) {
    for (int i = 0; i < 256; i++) {
        uint32_t value = (uint32_t)i;
        for (int bit = 0; bit < 8; bit++) value = value >> 1 ^ (value & 1 ? 0x82F63B78u : 0);
        table[0][i] = value;
    }
    for (int i = 0; i < 256; i++)
        for (int k = 1; k < 8; k++) table[k][i] = table[k - 1][i] >> 8 ^ table[0][table[k - 1][i] & 0xFF];
    fill_shift(after_long, LONG);
    fill_shift(after_short, SHORT);
}

static uint64_t load_bytes(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, 8);
    return value;
}

#if defined(__x86_64__)
#define HAS_CRC __builtin_cpu_supports("sse4.2")
#define CRC_TARGET __attribute__((target("sse4.2")))
#define CRC8(crc, byte) __builtin_ia32_crc32qi((uint32_t)(crc), (byte))
#define CRC64(crc, value) __builtin_ia32_crc32di((crc), (value))
#elif defined(__aarch64__) && defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#define HAS_CRC 1
#define CRC_TARGET
#define CRC8(crc, byte) __crc32cb((uint32_t)(crc), (byte))
#define CRC64(crc, value) __crc32cd((uint32_t)(crc), (value))
#endif

#ifdef HAS_CRC
static uint32_t shifted(uint32_t shift[4][256], uint32_t value) {
    return shift[0][value & 0xFF] ^ shift[1][value >> 8 & 0xFF] ^ shift[2][value >> 16 & 0xFF] ^ shift[3][value >> 24];
}

/* Three independent streams keep the instruction busy: it takes three cycles, and one can begin in each. */
CRC_TARGET static inline uint64_t three_streams(uint64_t crc, const uint8_t *at, size_t block, uint32_t shift[4][256]) {
    uint64_t second = 0, third = 0;
    for (size_t i = 0; i < block; i += 8) {
        crc = CRC64(crc, load_bytes(at + i));
        second = CRC64(second, load_bytes(at + block + i));
        third = CRC64(third, load_bytes(at + 2 * block + i));
    }
    crc = shifted(shift, (uint32_t)crc) ^ second;
    return shifted(shift, (uint32_t)crc) ^ third;
}

CRC_TARGET static uint32_t crc_by_instruction(uint32_t value, const uint8_t *at, size_t size) {
    uint64_t crc = ~value;
    for (; size >= 3 * LONG; at += 3 * LONG, size -= 3 * LONG) crc = three_streams(crc, at, LONG, after_long);
    for (; size >= 3 * SHORT; at += 3 * SHORT, size -= 3 * SHORT) crc = three_streams(crc, at, SHORT, after_short);
    for (; size >= 8; at += 8, size -= 8) crc = CRC64(crc, load_bytes(at));
    for (; size; at++, size--) crc = CRC8(crc, *at);
    return ~(uint32_t)crc;
}
#endif

static uint32_t crc_by_table(uint32_t value, const uint8_t *at, size_t size) {
    uint32_t crc = ~value;
    for (; size >= 8; at += 8, size -= 8) {
        uint64_t next = load_bytes(at) ^ crc;
        crc = 0;
        for (int k = 0; k < 8; k++) crc ^= table[7 - k][next >> 8 * k & 0xFF];
    }
    for (; size; at++, size--) crc = crc >> 8 ^ table[0][(crc ^ *at) & 0xFF];
    return ~crc;
}

static uint32_t crc32c(uint32_t value, const uint8_t *at, size_t size) {
#ifdef HAS_CRC
    if (HAS_CRC) return crc_by_instruction(value, at, size);
#endif
    return crc_by_table(value, at, size);
}

/* ---- Layout (layout.py) ---------------------------------------------------------------------------------------- */

typedef struct {
    uint8_t *base;
    uint32_t slots, units;
    size_t data;
    int log_slots;
} Ring;

typedef struct {
    uint32_t slot, unit;
} Position;

static uint64_t *word_at(const Ring *ring, size_t offset) { return (uint64_t *)(void *)(ring->base + offset); }
static uint64_t *slot_at(const Ring *ring, uint32_t number) {
    return word_at(ring, FIRST_SLOT + 8 * (size_t)(number & (ring->slots - 1)));
}
static uint8_t *entry_at(const Ring *ring, uint32_t unit) {
    return ring->base + ring->data + (size_t)(unit & (ring->units - 1)) * UNIT;
}
static uint32_t to_end(const Ring *ring, uint32_t unit) { return ring->units - (unit & (ring->units - 1)); }
static uint64_t generation(const Ring *ring, uint32_t number) { return number >> ring->log_slots & 0xFFFFFF; }

static uint64_t word_of(uint64_t gen, uint64_t state, uint64_t owner, uint64_t units) {
    return gen << 40 | state << 37 | owner << 27 | units;
}
static uint64_t generation_of(uint64_t word) { return word >> 40; }
static uint64_t empty_word(const Ring *ring, uint32_t number) { return word_of(generation(ring, number), EMPTY, 0, 0); }
static unsigned state_of(uint64_t word) { return word >> 37 & 7; }
static unsigned owner_of(uint64_t word) { return word >> 27 & 0x3FF; }
static uint32_t units_of(uint64_t word) { return word & 0x7FFFFFF; }
static uint64_t with_state(uint64_t word, uint64_t state) { return (word & ~(7ull << 37)) | state << 37; }
static uint64_t packed(Position at) { return (uint64_t)at.slot << 32 | at.unit; }
static Position unpacked(uint64_t word) { return (Position){(uint32_t)(word >> 32), (uint32_t)word}; }

static uint64_t load(const uint64_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
static int swap(uint64_t *word, uint64_t expected, uint64_t desired) {
    return __atomic_compare_exchange_n(word, &expected, desired, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

/* ---- Producer (produce.py) ------------------------------------------------------------------------------------- */

/* produce.reserve: SENT, and the entry's position and word; FULL; or BROKEN where it raises. */
static int reserve(const Ring *ring, unsigned owner, uint32_t units, Position *at, uint64_t *word) {
    for (;;) {
        Position head = unpacked(load(word_at(ring, HEAD)));
        Position hint = unpacked(load(word_at(ring, HINT)));
        Position tail = (int32_t)(hint.slot - head.slot) > 0 ? hint : head;
        uint64_t seen = 0;
        int is_stale = 0;
        for (;; tail.slot++, tail.unit += units_of(seen)) {
            if ((int32_t)(tail.slot - head.slot) >= (int32_t)ring->slots) return FULL;
            seen = load(slot_at(ring, tail.slot));
            is_stale = generation_of(seen) != generation(ring, tail.slot);
            if (is_stale || seen == empty_word(ring, tail.slot)) break;
            if (state_of(seen) == EMPTY || state_of(seen) > ABANDONED) return BROKEN;
        }
        if (is_stale) {
            if (load(word_at(ring, HEAD)) == packed(head)) return FULL;
            continue;
        }
        uint32_t room = to_end(ring, tail.unit), length = units <= room ? units : room;
        if ((uint64_t)(tail.unit - head.unit) + length > ring->units) return FULL;
        uint64_t empty = empty_word(ring, tail.slot);
        *word = word_of(generation(ring, tail.slot), units <= room ? RESERVED : PAD, owner, length);
        if (!swap(slot_at(ring, tail.slot), empty, *word)) continue;
        Position next = {tail.slot + 1, tail.unit + length};
        swap(word_at(ring, HINT), packed(hint), packed(next));
        if (units <= room) {
            *at = tail;
            return SENT;
        }
    }
}

static int commit(const Ring *ring, Position at, uint64_t word) {
    uint64_t *slot = slot_at(ring, at.slot);
    if (swap(slot, word, with_state(word, READY))) return SENT;
    swap(slot, with_state(word, ABANDONED), with_state(word, PAD));
    return LOST;
}

static void ring_bell(const Ring *ring, int bell_fd) {
    uint64_t one = 1;
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (bell_fd >= 0 && load(word_at(ring, BELL)) && swap(word_at(ring, BELL), 1, 0))
        while (write(bell_fd, &one, sizeof one) < 0 && errno == EINTR) continue;
}

typedef struct {
    uint32_t checksum, slot, epoch, header_bytes;
    uint64_t payload_bytes;
} Prologue;

static uint64_t payload_offset(uint64_t header_bytes) { return (PROLOGUE + header_bytes + UNIT - 1) / UNIT * UNIT; }
static uint64_t entry_units(uint64_t header_bytes, uint64_t payload_bytes) {
    uint64_t end = payload_bytes ? payload_offset(header_bytes) + payload_bytes : PROLOGUE + header_bytes;
    return (end + UNIT - 1) / UNIT;
}

/* Copy, and continue the checksum while the bytes are in the cache. */
static uint32_t copy(uint8_t *to, const uint8_t *from, size_t size, int is_checked, uint32_t value) {
    if (!is_checked) {
        memcpy(to, from, size);
        return 0;
    }
    for (size_t step; size; to += step, from += step, size -= step) {
        step = size < 4 * 3 * LONG ? size : 4 * 3 * LONG;
        memcpy(to, from, step);
        value = crc32c(value, from, step);
    }
    return value;
}

typedef struct {
    Py_buffer pieces[PIECES]; /* the header, then the payload's */
    int count;
    uint64_t payload_bytes;
    uint64_t units;
} Message;

/* entry.encode, into its place. */
static void write_entry(const Ring *ring, Position at, uint32_t epoch, const Message *message, int is_checked) {
    uint8_t *entry = entry_at(ring, at.unit);
    const Py_buffer *header = &message->pieces[0];
    Prologue prologue = {0, at.slot, epoch, (uint32_t)header->len, message->payload_bytes};
    uint32_t value = is_checked ? crc32c(0, (uint8_t *)&prologue + 4, PROLOGUE - 4) : 0;
    value = copy(entry + PROLOGUE, header->buf, (size_t)header->len, is_checked, value);
    uint8_t *to = entry + payload_offset((uint64_t)header->len);
    if (message->payload_bytes)
        memset(entry + PROLOGUE + header->len, 0, (size_t)(to - entry) - PROLOGUE - (size_t)header->len);
    for (int i = 1; i < message->count; i++) {
        value = copy(to, message->pieces[i].buf, (size_t)message->pieces[i].len, is_checked, value);
        to += message->pieces[i].len;
    }
    prologue.checksum = value;
    memcpy(entry, &prologue, PROLOGUE);
}

static int send_one(const Ring *ring, unsigned owner, uint32_t epoch, const Message *message, int is_checked, int bell) {
    Position at;
    uint64_t word;
    int outcome = reserve(ring, owner, (uint32_t)message->units, &at, &word);
    if (outcome != SENT) return outcome;
    write_entry(ring, at, epoch, message, is_checked);
    outcome = commit(ring, at, word);
    if (outcome == SENT) ring_bell(ring, bell);
    return outcome;
}

/* ---- Consumer (consume.py, entry.py) --------------------------------------------------------------------------- */

typedef struct {
    Position at;
    uint64_t word;
    int is_valid;
    Prologue prologue;
} Entry;

typedef struct {
    int is_checked;
    const uint32_t *epochs; /* of each owner */
} Reading;

/* entry.decode, and whether the entry is of the present holder of its owner's id */
static int is_valid(const Ring *ring, Position at, uint64_t word, const Reading *reading, Prologue *prologue) {
    const uint8_t *entry = entry_at(ring, at.unit);
    memcpy(prologue, entry, PROLOGUE);
    if (prologue->epoch != reading->epochs[owner_of(word)]) return 0;
    if (prologue->slot != at.slot || prologue->payload_bytes > (uint64_t)ring->units * UNIT) return 0;
    if (entry_units(prologue->header_bytes, prologue->payload_bytes) != units_of(word)) return 0;
    if (!reading->is_checked) return 1;
    uint32_t value = crc32c(0, (uint8_t *)prologue + 4, PROLOGUE - 4);
    value = crc32c(value, entry + PROLOGUE, prologue->header_bytes);
    if (prologue->payload_bytes)
        value = crc32c(value, entry + payload_offset(prologue->header_bytes), prologue->payload_bytes);
    return value == prologue->checksum;
}

static int is_used_well(const Ring *ring, Position at, uint64_t word) {
    uint32_t units = units_of(word);
    return generation_of(word) == generation(ring, at.slot) && state_of(word) <= ABANDONED &&
           (state_of(word) == EMPTY || (units > 0 && units <= to_end(ring, at.unit)));
}

static int is_later_word(uint64_t before, uint64_t after) {
    unsigned state = state_of(after);
    if (state_of(before) == ABANDONED && state != ABANDONED && state != PAD) return 0;
    return state >= RESERVED && state <= ABANDONED && with_state(before, 0) == with_state(after, 0);
}

static PyObject *as_tuple(const Entry *entry) {
    PyObject *parts[6] = {
        PyLong_FromUnsignedLong(entry->at.slot),
        PyLong_FromUnsignedLong(entry->at.unit),
        PyLong_FromUnsignedLongLong(entry->word),
        PyLong_FromUnsignedLong(entry->prologue.epoch),
        PyLong_FromLongLong(entry->is_valid ? (long long)entry->prologue.header_bytes : -1),
        PyLong_FromUnsignedLongLong(entry->prologue.payload_bytes),
    };
    PyObject *tuple = PyTuple_New(6);
    for (Py_ssize_t i = 0; i < 6; i++) {
        if (tuple && parts[i])
            PyTuple_SetItem(tuple, i, parts[i]);
        else {
            Py_XDECREF(parts[i]);
            Py_CLEAR(tuple);
        }
    }
    return tuple;
}

/* Append what was seen of a slot; READY entries are checked. 0 with an exception if there is no memory. */
static int append(const Ring *ring, PyObject *found, Position at, uint64_t word, const Reading *reading) {
    Entry entry = {at, word, 0, {0, 0, 0, 0, 0}};
    if (state_of(word) == READY) {
        int is_long = (size_t)units_of(word) * UNIT >= COPY_WITHOUT_GIL;
        PyThreadState *thread = is_long ? PyEval_SaveThread() : NULL;
        entry.is_valid = is_valid(ring, at, word, reading, &entry.prologue);
        if (is_long) PyEval_RestoreThread(thread);
        if (!entry.is_valid) entry.prologue = (Prologue){0, 0, 0, 0, 0};
    }
    PyObject *tuple = as_tuple(&entry);
    int failed = !tuple || PyList_Append(found, tuple) < 0;
    Py_XDECREF(tuple);
    return !failed;
}

/* ---- Python ---------------------------------------------------------------------------------------------------- */

static int as_u64(PyObject *value, uint64_t *out) {
    *out = PyLong_AsUnsignedLongLong(value);
    return !(*out == (uint64_t)-1 && PyErr_Occurred());
}

/* The first arguments of each call: memory, slots, units. */
static int open_ring(PyObject *const *args, Py_buffer *memory, Ring *ring) {
    uint64_t slots, units;
    if (!as_u64(args[1], &slots) || !as_u64(args[2], &units)) return 0;
    if (PyObject_GetBuffer(args[0], memory, PyBUF_WRITABLE) < 0) return 0;
    ring->base = memory->buf;
    ring->slots = (uint32_t)slots;
    ring->units = (uint32_t)units;
    ring->data = (FIRST_SLOT + 8 * (size_t)slots + PAGE - 1) / PAGE * PAGE;
    ring->log_slots = slots ? __builtin_ctzll(slots) : 0;
    if (slots < 2 || slots > 1 << 20 || slots & (slots - 1) || units < 2 || units > 1 << 26 || units & (units - 1) ||
        (size_t)memory->len < ring->data + units * UNIT || (uintptr_t)memory->buf % 8) {
        PyBuffer_Release(memory);
        PyErr_SetString(PyExc_ValueError, "the memory is not that of a ring of so many slots and units");
        return 0;
    }
    return 1;
}

static int has_count(const char *name, Py_ssize_t given, Py_ssize_t wanted) {
    if (given == wanted) return 1;
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, not %zd", name, wanted, given);
    return 0;
}

static int open_bytes(PyObject *source, Py_buffer *memory, uint64_t offset, uint64_t size, int flags) {
    if (PyObject_GetBuffer(source, memory, flags) < 0) return 0;
    if (offset <= (uint64_t)memory->len && size <= (uint64_t)memory->len - offset) return 1;
    PyBuffer_Release(memory);
    PyErr_Format(PyExc_ValueError, "%llu bytes from %llu on are not in the memory", (unsigned long long)size,
                 (unsigned long long)offset);
    return 0;
}

static int is_word(const uint8_t *at, uint64_t size) { return size == 8 && (uintptr_t)at % 8 == 0; }

PyDoc_STRVAR(get_doc, "get(memory, offset, size) -> bytes; a word is read at once");
static PyObject *native_get(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    uint64_t offset, size;
    Py_buffer memory;
    (void)module;
    if (!has_count("get", count, 3) || !as_u64(args[1], &offset) || !as_u64(args[2], &size)) return NULL;
    if (!open_bytes(args[0], &memory, offset, size, PyBUF_SIMPLE)) return NULL;
    const uint8_t *at = (const uint8_t *)memory.buf + offset;
    PyObject *result;
    if (is_word(at, size)) {
        uint64_t word = __atomic_load_n((const uint64_t *)(const void *)at, __ATOMIC_SEQ_CST);
        result = PyBytes_FromStringAndSize((const char *)&word, 8);
    } else
        result = PyBytes_FromStringAndSize((const char *)at, (Py_ssize_t)size);
    PyBuffer_Release(&memory);
    return result;
}

PyDoc_STRVAR(put_doc, "put(memory, offset, buffer); a word is written at once");
static PyObject *native_put(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    uint64_t offset;
    Py_buffer memory, source;
    (void)module;
    if (!has_count("put", count, 3) || !as_u64(args[1], &offset)) return NULL;
    if (PyObject_GetBuffer(args[2], &source, PyBUF_SIMPLE) < 0) return NULL;
    if (!open_bytes(args[0], &memory, offset, (uint64_t)source.len, PyBUF_WRITABLE)) {
        PyBuffer_Release(&source);
        return NULL;
    }
    uint8_t *at = (uint8_t *)memory.buf + offset;
    if (is_word(at, (uint64_t)source.len))
        __atomic_store_n((uint64_t *)(void *)at, load_bytes(source.buf), __ATOMIC_SEQ_CST);
    else {
        Py_BEGIN_ALLOW_THREADS
        memcpy(at, source.buf, (size_t)source.len);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&memory);
    PyBuffer_Release(&source);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(cas64_doc, "cas64(memory, offset, expected, desired) -> what was there before");
static PyObject *native_cas64(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    uint64_t offset, expected, desired;
    Py_buffer memory;
    (void)module;
    if (!has_count("cas64", count, 4) || !as_u64(args[1], &offset) || !as_u64(args[2], &expected) ||
        !as_u64(args[3], &desired))
        return NULL;
    if (!open_bytes(args[0], &memory, offset, 8, PyBUF_WRITABLE)) return NULL;
    uint8_t *at = (uint8_t *)memory.buf + offset;
    if (!is_word(at, 8)) {
        PyBuffer_Release(&memory);
        PyErr_Format(PyExc_ValueError, "offset %llu is no multiple of 8", (unsigned long long)offset);
        return NULL;
    }
    uint64_t *word = (uint64_t *)(void *)at;
    __atomic_compare_exchange_n(word, &expected, desired, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    PyBuffer_Release(&memory);
    return PyLong_FromUnsignedLongLong(expected);
}

PyDoc_STRVAR(crc32c_doc, "crc32c(buffer, value) -> the checksum continued by the buffer; begins with 0");
static PyObject *native_crc32c(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    uint64_t value;
    Py_buffer source;
    (void)module;
    if (!has_count("crc32c", count, 2) || !as_u64(args[1], &value)) return NULL;
    if (PyObject_GetBuffer(args[0], &source, PyBUF_SIMPLE) < 0) return NULL;
    value = crc32c((uint32_t)value, source.buf, (size_t)source.len);
    PyBuffer_Release(&source);
    return PyLong_FromUnsignedLongLong(value);
}

static void close_message(Message *message) {
    while (message->count) PyBuffer_Release(&message->pieces[--message->count]);
}

/* A message is a tuple of a header and the buffers of its payload. */
static int open_message(const Ring *ring, PyObject *parts, Message *message) {
    message->count = 0;
    message->payload_bytes = 0;
    Py_ssize_t size = PyTuple_Check(parts) ? PyTuple_Size(parts) : 0;
    if (size < 1 || size > PIECES) {
        PyErr_Format(PyExc_ValueError, "a message is a tuple of a header and at most %d buffers", PIECES - 1);
        return 0;
    }
    for (Py_ssize_t i = 0; i < size; i++) {
        Py_buffer *piece = &message->pieces[message->count];
        if (PyObject_GetBuffer(PyTuple_GetItem(parts, i), piece, PyBUF_SIMPLE) < 0) {
            close_message(message);
            return 0;
        }
        if (message->count++) message->payload_bytes += (uint64_t)piece->len;
    }
    message->units = entry_units((uint64_t)message->pieces[0].len, message->payload_bytes);
    if (message->units <= ring->units / 2) return 1;
    close_message(message);
    PyErr_Format(PyExc_ValueError, "a message of %llu bytes is longer than half of the ring, %llu bytes",
                 (unsigned long long)message->units * UNIT, (unsigned long long)ring->units / 2 * UNIT);
    return 0;
}

PyDoc_STRVAR(send_doc,
             "send(memory, slots, units, owner, epoch, is_checked, bell, messages, first) -> (how many of these, from\n"
             "the first on, were sent, outcome of the one behind them: 0 there is none, 1 no room, 2 it is lost)");
static PyObject *native_send(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    Py_buffer memory;
    Ring ring;
    uint64_t owner, epoch, first;
    (void)module;
    if (!has_count("send", count, 9) || !as_u64(args[3], &owner) || !as_u64(args[4], &epoch)) return NULL;
    int is_checked = PyObject_IsTrue(args[5]);
    long bell = PyLong_AsLong(args[6]);
    if (!as_u64(args[8], &first) || PyErr_Occurred()) return NULL;
    if (!PyList_Check(args[7]) || owner >= OWNERS) {
        PyErr_SetString(PyExc_ValueError, "messages are a list, and an owner is less than 1024");
        return NULL;
    }
    if (!open_ring(args, &memory, &ring)) return NULL;
    int outcome = SENT;
    Py_ssize_t next = (Py_ssize_t)first;
    for (; next < PyList_Size(args[7]); next++) {
        Message message;
        if (!open_message(&ring, PyList_GetItem(args[7], next), &message)) {
            PyBuffer_Release(&memory);
            return NULL;
        }
        int is_long = message.units * UNIT >= COPY_WITHOUT_GIL;
        PyThreadState *thread = is_long ? PyEval_SaveThread() : NULL;
        outcome = send_one(&ring, (unsigned)owner, (uint32_t)epoch, &message, is_checked, (int)bell);
        if (is_long) PyEval_RestoreThread(thread);
        close_message(&message);
        if (outcome != SENT) break;
    }
    PyBuffer_Release(&memory);
    if (outcome == BROKEN) {
        PyErr_SetString(corrupted, "a slot holds a word that no producer writes");
        return NULL;
    }
    return Py_BuildValue("ni", next - (Py_ssize_t)first, outcome);
}

/* Look at the waiting entries again. 0 with an exception. `undecided` gets the owners of those that still wait. */
static int look_again(const Ring *ring, PyObject *waiting, PyObject *found, const Reading *reading, Py_ssize_t limit,
                      uint8_t *undecided, Py_ssize_t *ready) {
    for (Py_ssize_t i = 0; i < PyList_Size(waiting) && *ready < limit; i++) {
        unsigned long slot, unit;
        unsigned long long before;
        if (!PyArg_ParseTuple(PyList_GetItem(waiting, i), "kkK", &slot, &unit, &before)) return 0;
        Position at = {(uint32_t)slot, (uint32_t)unit};
        uint64_t word = load(slot_at(ring, at.slot));
        if (!is_later_word(before, word)) {
            PyErr_Format(corrupted, "slot %lu went from %llx to %llx", slot, before, (unsigned long long)word);
            return 0;
        }
        if (word != before && !append(ring, found, at, word, reading)) return 0;
        if (state_of(word) == READY)
            ++*ready;
        else if (state_of(word) != PAD)
            undecided[owner_of(word)] = 1;
    }
    return 1;
}

PyDoc_STRVAR(look_doc,
             "look(memory, slots, units, is_checked, head_slot, scan_slot, scan_unit, waiting, limit, epochs) ->\n"
             "(entries, scan_slot, scan_unit). As consume.look without its advance: `waiting` has (slot, unit, word) of\n"
             "entries that are not committed, which are among the answers if their word has changed. An entry is (slot,\n"
             "unit, word, epoch, header bytes, or -1 if it is damaged, payload bytes). `epochs` has four bytes per owner.");
static PyObject *native_look(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    Py_buffer memory;
    Ring ring;
    uint64_t head_slot, slot, unit, limit;
    Py_buffer epochs;
    uint8_t undecided[OWNERS] = {0};
    Py_ssize_t ready = 0;
    (void)module;
    if (!has_count("look", count, 10) || !as_u64(args[4], &head_slot) || !as_u64(args[5], &slot) ||
        !as_u64(args[6], &unit) || !as_u64(args[8], &limit))
        return NULL;
    if (!open_bytes(args[9], &epochs, 0, OWNERS * sizeof(uint32_t), PyBUF_SIMPLE)) return NULL;
    if (!open_ring(args, &memory, &ring)) {
        PyBuffer_Release(&epochs);
        return NULL;
    }
    Reading reading = {PyObject_IsTrue(args[3]), epochs.buf};
    PyObject *found = PyList_New(0);
    int is_fine = found && look_again(&ring, args[7], found, &reading, (Py_ssize_t)limit, undecided, &ready);
    Position scan = {(uint32_t)slot, (uint32_t)unit};
    while (is_fine && ready < (Py_ssize_t)limit && scan.slot - (uint32_t)head_slot < ring.slots) {
        uint64_t word = load(slot_at(&ring, scan.slot));
        if (!is_used_well(&ring, scan, word)) {
            PyErr_Format(corrupted, "slot %u holds %llx, which no producer writes", scan.slot, (unsigned long long)word);
            is_fine = 0;
            break;
        }
        unsigned state = state_of(word);
        if (state == EMPTY || (state == READY && undecided[owner_of(word)])) break;
        if (state != PAD) is_fine = append(&ring, found, scan, word, &reading);
        if (state == READY)
            ready++;
        else if (state != PAD)
            undecided[owner_of(word)] = 1;
        scan = (Position){scan.slot + 1, scan.unit + units_of(word)};
    }
    PyBuffer_Release(&memory);
    PyBuffer_Release(&epochs);
    if (!is_fine) {
        Py_XDECREF(found);
        return NULL;
    }
    return Py_BuildValue("Nkk", found, (unsigned long)scan.slot, (unsigned long)scan.unit);
}

PyDoc_STRVAR(advance_doc, "advance(memory, slots, units, head_slot, new_slot, new_unit): as consume.advance");
static PyObject *native_advance(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    Py_buffer memory;
    Ring ring;
    uint64_t old_slot, slot, unit;
    (void)module;
    if (!has_count("advance", count, 6) || !as_u64(args[3], &old_slot) || !as_u64(args[4], &slot) ||
        !as_u64(args[5], &unit))
        return NULL;
    if (!open_ring(args, &memory, &ring)) return NULL;
    Position head = {(uint32_t)slot, (uint32_t)unit};
    __atomic_store_n(word_at(&ring, HEAD), packed(head), __ATOMIC_RELEASE);
    for (uint32_t number = (uint32_t)old_slot; number != head.slot; number++)
        __atomic_store_n(slot_at(&ring, number), empty_word(&ring, number + ring.slots), __ATOMIC_RELEASE);
    PyBuffer_Release(&memory);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(copies_doc, "copies(memory, slots, units, entries) -> a list of (header, payload) of valid entries of look");
static PyObject *native_copies(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    Py_buffer memory;
    Ring ring;
    (void)module;
    if (!has_count("copies", count, 4) || !open_ring(args, &memory, &ring)) return NULL;
    PyObject *result = PyList_New(0);
    for (Py_ssize_t i = 0; result && i < PyList_Size(args[3]); i++) {
        unsigned long slot, unit, epoch;
        unsigned long long word, payload_bytes;
        long long header_bytes;
        if (!PyArg_ParseTuple(PyList_GetItem(args[3], i), "kkKkLK", &slot, &unit, &word, &epoch, &header_bytes,
                              &payload_bytes)) {
            Py_CLEAR(result);
            break;
        }
        if (state_of(word) != READY || header_bytes < 0) continue;
        const char *entry = (const char *)entry_at(&ring, (uint32_t)unit);
        size_t start = payload_bytes ? payload_offset((uint64_t)header_bytes) : 0;
        PyObject *message = Py_BuildValue("NN", PyBytes_FromStringAndSize(entry + PROLOGUE, (Py_ssize_t)header_bytes),
                                          PyBytes_FromStringAndSize(entry + start, (Py_ssize_t)payload_bytes));
        if (!message || PyList_Append(result, message) < 0) Py_CLEAR(result);
        Py_XDECREF(message);
    }
    PyBuffer_Release(&memory);
    return result;
}

#define CALL(name) {#name, (PyCFunction)(void (*)(void))native_##name, METH_FASTCALL, name##_doc}
static PyMethodDef methods[] = {CALL(get),  CALL(put),  CALL(cas64),   CALL(crc32c),
                                CALL(send), CALL(look), CALL(advance), CALL(copies),
                                {NULL, NULL, 0, NULL}};

static int prepare(PyObject *module) {
    (void)module;
    fill_tables();
    PyObject *errors = PyImport_ImportModule("tilework.comm.ring.errors");
    if (!errors) return -1;
    corrupted = PyObject_GetAttrString(errors, "RingCorrupted");
    Py_DECREF(errors);
    return corrupted ? 0 : -1;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, prepare}, {0, NULL}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_native", "A ring on shared memory, with atomic instructions.", 0, methods, module_slots,
    NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
