/* Protection of many QUIC 1-RTT packets at once (RFC 9001 section 5), with their STREAM frames:
 * `Keys` of moqt/quic/packets/protection.py, which says what goes in and comes out, on OpenSSL.
 *
 * Python objects are read and made with the GIL held, ciphers run without it where a call has more
 * than a few packets. Nothing but the keys outlives a call. Limited API of CPython 3.11. */
#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030b0000
#endif
#include <Python.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if PY_VERSION_HEX >= 0x030d0000
/* What these headers call takes # for an int in CPython before 3.13; these take it for Py_ssize_t in all. */
PyAPI_FUNC(int) _PyArg_ParseTuple_SizeT(PyObject *, const char *, ...);
PyAPI_FUNC(PyObject *) _Py_BuildValue_SizeT(const char *, ...);
#define PyArg_ParseTuple _PyArg_ParseTuple_SizeT
#define Py_BuildValue _Py_BuildValue_SizeT
#endif

/* Of moqt/quic/backend.py, which takes no other. */
#define VERSION 1

enum { TAG = 16, NUMBER = 2, SAMPLE = 16, NONCE = 12, MAX_CID = 20 };
enum { MAX_PACKETS = 1 << 16, MAX_PACKET = 1 << 16 };
enum { FEW = 4 }; /* packets for which giving up the GIL costs more than it gives */
enum { KEY_PHASE = 0x04, RESERVED = 0x18 };

typedef struct {
    PyObject_HEAD
    EVP_CIPHER_CTX *aead, *header;
    int chacha, sealing, busy;
    unsigned char iv[NONCE];
} Keys;

/* Raise RuntimeError. What OpenSSL has noted of it would look like a fault of the next TLS
 * connection that this thread looks at, with Python's ssl on the same library. */
static void refuse(const char *what) {
    ERR_clear_error();
    PyErr_SetString(PyExc_RuntimeError, what);
}

/* ---- keys */

static void keys_dealloc(PyObject *object) {
    Keys *self = (Keys *)object;
    PyTypeObject *type = Py_TYPE(object);
    EVP_CIPHER_CTX_free(self->aead); /* which wipes the key */
    EVP_CIPHER_CTX_free(self->header);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

/* Keys(suite, key, iv, hp, sealing); suites are numbered as in protection.py. */
static PyObject *keys_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    int suite, sealing;
    const unsigned char *key, *iv, *hp;
    Py_ssize_t key_size, iv_size, hp_size;
    const EVP_CIPHER *aead, *header;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "iy#y#y#p", &suite, &key, &key_size, &iv, &iv_size, &hp, &hp_size, &sealing))
        return NULL;
    switch (suite) {
    case 0: aead = EVP_aes_128_gcm(); header = EVP_aes_128_ecb(); break;
    case 1: aead = EVP_aes_256_gcm(); header = EVP_aes_256_ecb(); break;
    case 2: aead = EVP_chacha20_poly1305(); header = EVP_chacha20(); break;
    default: PyErr_SetString(PyExc_ValueError, "there is no such cipher suite"); return NULL;
    }
    if (key_size != EVP_CIPHER_key_length(aead) || hp_size != key_size || iv_size != NONCE) {
        PyErr_SetString(PyExc_ValueError, "keys of a wrong length");
        return NULL;
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Keys *self = (Keys *)allocate(type, 0);
    if (!self) return NULL;
    self->chacha = suite == 2;
    self->sealing = sealing;
    memcpy(self->iv, iv, NONCE);
    self->aead = EVP_CIPHER_CTX_new();
    self->header = EVP_CIPHER_CTX_new();
    if (!self->aead || !self->header || !EVP_CipherInit_ex(self->aead, aead, NULL, key, NULL, sealing) ||
        !EVP_EncryptInit_ex(self->header, header, NULL, hp, NULL) ||
        !EVP_CIPHER_CTX_set_padding(self->header, 0)) {
        Py_DECREF(self);
        refuse("OpenSSL does not take the keys");
        return NULL;
    }
    return (PyObject *)self;
}

/* One call at a time: the ciphers' contexts are changed without the GIL. */
static int begin(Keys *self, int sealing) {
    if (self->busy || self->sealing != sealing) {
        PyErr_SetString(PyExc_RuntimeError, self->busy ? "these keys are in use in another thread"
                                                       : "these keys are for the other direction");
        return 0;
    }
    self->busy = 1;
    return 1;
}

static void nonce(const Keys *self, uint64_t number, unsigned char *out) {
    memcpy(out, self->iv, NONCE);
    for (int i = 0; i < 8; i++) out[NONCE - 1 - i] ^= (unsigned char)(number >> (8 * i));
}

/* `count` masks from as many samples, SAMPLE octets apart. */
static int make_masks(Keys *self, const unsigned char *samples, unsigned char *out, size_t count) {
    static const unsigned char zeros[5];
    int size;
    if (!count) return 1;
    if (!self->chacha) return EVP_EncryptUpdate(self->header, out, &size, samples, (int)(count * SAMPLE));
    for (size_t i = 0; i < count; i++)
        if (!EVP_EncryptInit_ex(self->header, NULL, NULL, NULL, samples + i * SAMPLE) ||
            !EVP_EncryptUpdate(self->header, out + i * SAMPLE, &size, zeros, sizeof zeros))
            return 0;
    return 1;
}

/* ---- seal */

typedef struct { unsigned char *at; size_t size; } Packet;

/* What the pieces of a frame hold, in order. */
typedef struct { PyObject *pieces; Py_ssize_t next; Py_buffer view; int open; size_t at; } Source;

static int source_copy(Source *source, unsigned char *out, size_t size) {
    while (size) {
        if (!source->open) {
            PyObject *piece = PyList_GetItem(source->pieces, source->next); /* borrowed */
            if (!piece || PyObject_GetBuffer(piece, &source->view, PyBUF_SIMPLE) < 0) return 0;
            source->open = 1;
            source->next++;
            source->at = 0;
        }
        size_t some = (size_t)source->view.len - source->at;
        if (some > size) some = size;
        memcpy(out, (const unsigned char *)source->view.buf + source->at, some);
        out += some;
        size -= some;
        source->at += some;
        if (source->at == (size_t)source->view.len) {
            PyBuffer_Release(&source->view);
            source->open = 0;
        }
    }
    return 1;
}

typedef struct {
    const unsigned char *id;
    Py_ssize_t id_size, length;
    int width, fin;
    unsigned long long start;
    PyObject *pieces;
} Frame;

static int read_frame(PyObject *object, Frame *frame) {
    if (!PyTuple_Check(object)) {
        PyErr_SetString(PyExc_TypeError, "a frame is a tuple");
        return 0;
    }
    if (!PyArg_ParseTuple(object, "y#iKnpO", &frame->id, &frame->id_size, &frame->width, &frame->start,
                          &frame->length, &frame->fin, &frame->pieces))
        return 0;
    if (frame->id_size < 1 || frame->id_size > 8 || frame->length < 0 || !PyList_Check(frame->pieces) ||
        !(frame->width == 4 || frame->width == 8 || (frame->width == 0 && frame->start == 0)) ||
        frame->start + (uint64_t)frame->length > (frame->width == 8 ? 1ULL << 62 : 1ULL << 30)) {
        PyErr_SetString(PyExc_ValueError, "a STREAM frame that cannot be written");
        return 0;
    }
    return 1;
}

static unsigned char *write_header(unsigned char *out, const Frame *frame, uint64_t start, size_t length,
                                   int fin) {
    *out++ = (unsigned char)((frame->width ? 0x0E : 0x0A) | fin);
    memcpy(out, frame->id, (size_t)frame->id_size);
    out += frame->id_size;
    for (int i = frame->width - 1; i >= 0; i--) *out++ = (unsigned char)(start >> (8 * i));
    if (frame->width) out[-frame->width] |= frame->width == 4 ? 0x80 : 0xC0;
    *out++ = (unsigned char)(0x40 | length >> 8);
    *out++ = (unsigned char)length;
    return out;
}

/* A packet behind those in `list`, of which all but its frames is written: where they begin. */
static unsigned char *add_packet(PyObject *list, Packet *packet, const unsigned char *prefix,
                                 Py_ssize_t prefix_size, size_t clear, uint64_t number) {
    size_t head = (size_t)prefix_size + NUMBER;
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(head + clear + TAG));
    int kept = bytes && PyList_Append(list, bytes) == 0;
    Py_XDECREF(bytes); /* the list has it */
    if (!kept) return NULL;
    unsigned char *out = (unsigned char *)PyBytes_AsString(bytes);
    *packet = (Packet){out, head + clear + TAG};
    memcpy(out, prefix, (size_t)prefix_size);
    out[head - 2] = (unsigned char)(number >> 8);
    out[head - 1] = (unsigned char)number;
    return out + head;
}

/* The packets of one group in clear, behind `packets`; how many, or -1. */
static Py_ssize_t write_group(PyObject *group, PyObject *list, Packet *packets, Py_ssize_t most,
                              const unsigned char *prefix, Py_ssize_t prefix_size, uint64_t number) {
    Py_ssize_t count, made = -1;
    PyObject *frames;
    if (!PyTuple_Check(group) || !PyArg_ParseTuple(group, "nO", &count, &frames)) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "a group is a tuple");
        return -1;
    }
    size_t clear = 0;
    if (PyBytes_Check(frames) && count == 1 && count <= most) {
        clear = (size_t)PyBytes_Size(frames);
        if (clear < 4 - NUMBER || clear > MAX_PACKET) {
            PyErr_SetString(PyExc_ValueError, "frames that make no packet");
            return -1;
        }
        unsigned char *out = add_packet(list, packets, prefix, prefix_size, clear, number);
        if (!out) return -1;
        memcpy(out, PyBytes_AsString(frames), clear);
        return 1;
    }
    Py_ssize_t kinds = PyList_Check(frames) ? PyList_Size(frames) : 0;
    if (count < 1 || count > most || kinds < 1 || (count > 1 && kinds > 1)) {
        PyErr_SetString(PyExc_ValueError, "a group without packets or frames, or with too many");
        return -1;
    }
    Source source = {0};
    Frame frame;
    for (Py_ssize_t i = 0; i < kinds; i++) { /* how large the packets are */
        if (!read_frame(PyList_GetItem(frames, i), &frame)) return -1;
        size_t each = (size_t)frame.length / (size_t)count;
        if (each > 0x3FFF || each * (size_t)count != (size_t)frame.length) {
            PyErr_SetString(PyExc_ValueError, "a STREAM frame of a wrong length");
            return -1;
        }
        clear += 3 + (size_t)frame.width + (size_t)frame.id_size + each;
    }
    if (clear > MAX_PACKET) {
        PyErr_SetString(PyExc_ValueError, "a packet that is too large");
        return -1;
    }
    source.pieces = frame.pieces;
    for (Py_ssize_t done = 0; done < count; done++) {
        uint64_t its = number + (uint64_t)done;
        unsigned char *out = add_packet(list, packets + done, prefix, prefix_size, clear, its);
        if (!out) goto end;
        for (Py_ssize_t i = 0; i < kinds; i++) {
            if (kinds > 1) {
                if (!read_frame(PyList_GetItem(frames, i), &frame)) goto end;
                source = (Source){.pieces = frame.pieces};
            }
            size_t each = (size_t)frame.length / (size_t)count;
            int last = done == count - 1;
            out = write_header(out, &frame, frame.start + (uint64_t)done * each, each, frame.fin && last);
            if (!source_copy(&source, out, each)) goto end;
            out += each;
            if (last && (source.open || source.next != PyList_Size(source.pieces))) {
                PyErr_SetString(PyExc_ValueError, "a STREAM frame with more data than its length");
                goto end;
            }
        }
    }
    made = count;
end:
    if (source.open) PyBuffer_Release(&source.view);
    return made;
}

static int protect(Keys *self, Packet *packets, size_t count, size_t head, uint64_t number,
                   unsigned char *samples) {
    unsigned char *masks = samples + count * SAMPLE, iv[NONCE];
    int size, rest;
    for (size_t i = 0; i < count; i++) {
        unsigned char *at = packets[i].at, *body = at + head;
        size_t clear = packets[i].size - head - TAG;
        nonce(self, number + i, iv);
        if (!EVP_EncryptInit_ex(self->aead, NULL, NULL, NULL, iv) ||
            !EVP_EncryptUpdate(self->aead, NULL, &size, at, (int)head) ||
            !EVP_EncryptUpdate(self->aead, body, &size, body, (int)clear) ||
            !EVP_EncryptFinal_ex(self->aead, body + size, &rest) ||
            !EVP_CIPHER_CTX_ctrl(self->aead, EVP_CTRL_AEAD_GET_TAG, TAG, body + clear))
            return 0;
        memcpy(samples + i * SAMPLE, at + head - NUMBER + 4, SAMPLE);
    }
    if (!make_masks(self, samples, masks, count)) return 0;
    for (size_t i = 0; i < count; i++, masks += SAMPLE) {
        packets[i].at[0] ^= masks[0] & 0x1F;
        packets[i].at[head - 2] ^= masks[1];
        packets[i].at[head - 1] ^= masks[2];
    }
    return 1;
}

static PyObject *keys_seal(PyObject *object, PyObject *args) {
    Keys *self = (Keys *)object;
    const unsigned char *prefix;
    Py_ssize_t prefix_size;
    unsigned long long number;
    PyObject *groups, *list = NULL;
    Packet *packets = NULL;
    unsigned char *samples = NULL;
    if (!PyArg_ParseTuple(args, "y#KO!", &prefix, &prefix_size, &number, &PyList_Type, &groups)) return NULL;
    if (prefix_size < 1 || prefix_size > 1 + MAX_CID || number >= 1ULL << 62) {
        PyErr_SetString(PyExc_ValueError, "a header that cannot be written");
        return NULL;
    }
    if (!begin(self, 1)) return NULL;
    /* How many there are: what a group says is checked where it is written. */
    Py_ssize_t kinds = PyList_Size(groups), most = 0, count = 0;
    for (Py_ssize_t i = 0; i < kinds; i++) {
        PyObject *group = PyList_GetItem(groups, i);
        Py_ssize_t some = 0;
        if (PyTuple_Check(group) && PyTuple_Size(group) == 2)
            some = PyLong_AsSsize_t(PyTuple_GetItem(group, 0));
        if (some < 1 || some > MAX_PACKETS - most) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "too many packets, or none");
            goto done;
        }
        most += some;
    }
    list = PyList_New(0);
    packets = malloc((size_t)(most ? most : 1) * sizeof *packets);
    samples = malloc((size_t)(most ? most : 1) * 2 * SAMPLE);
    if (!list || !packets || !samples) {
        PyErr_NoMemory();
        goto fail;
    }
    for (Py_ssize_t i = 0; i < kinds; i++) {
        Py_ssize_t made = write_group(PyList_GetItem(groups, i), list, packets + count, most - count,
                                      prefix, prefix_size, number + (uint64_t)count);
        if (made < 0) goto fail;
        count += made;
    }
    size_t head = (size_t)prefix_size + NUMBER;
    PyThreadState *others = count < FEW ? NULL : PyEval_SaveThread();
    int well = protect(self, packets, (size_t)count, head, number, samples);
    if (others) PyEval_RestoreThread(others);
    if (well) goto done;
    refuse("OpenSSL cannot seal");
fail:
    Py_CLEAR(list);
done:
    free(packets);
    free(samples);
    self->busy = 0;
    return list;
}

/* ---- open */

typedef struct { uint64_t start, stop; int first, eliciting; size_t events, count; } Run;

typedef struct {
    int stream; /* else: frames that are left to the caller */
    int flag;   /* FIN, or whether STREAM frames were before in the packet */
    uint64_t id, offset;
    size_t at, length;
} Event;

typedef struct {
    Run *runs;
    Event *events;
    size_t run_count, run_room, event_count, event_room;
    unsigned char *clear; /* as large as all packets together */
    size_t used;
} Read;

static int get_varint(const unsigned char *octets, size_t end, size_t *pos, uint64_t *value) {
    if (*pos >= end) return 0;
    size_t size = (size_t)1 << (octets[*pos] >> 6);
    if (size > end - *pos) return 0;
    uint64_t read = octets[*pos] & 0x3F;
    for (size_t i = 1; i < size; i++) read = read << 8 | octets[*pos + i];
    *pos += size;
    *value = read;
    return 1;
}

static int add_event(Read *read, Event event) {
    if (read->event_count == read->event_room) {
        size_t room = read->event_room ? 2 * read->event_room : 64;
        Event *grown = realloc(read->events, room * sizeof *grown);
        if (!grown) return 0;
        read->events = grown;
        read->event_room = room;
    }
    read->events[read->event_count++] = event;
    read->runs[read->run_count - 1].count++;
    return 1;
}

static int add_run(Read *read, uint64_t number) {
    if (read->run_count == read->run_room) {
        size_t room = read->run_room ? 2 * read->run_room : 16;
        Run *grown = realloc(read->runs, room * sizeof *grown);
        if (!grown) return 0;
        read->runs = grown;
        read->run_room = room;
    }
    read->runs[read->run_count++] = (Run){.start = number, .stop = number + 1, .events = read->event_count};
    return 1;
}

/* Read the frames of a packet that is `size` octets from `read->used` on into the last run. */
static int read_frames(Read *read, size_t size) {
    unsigned char *clear = read->clear;
    size_t pos = read->used, end = pos + size;
    int found = 0;
    if (!size && !add_event(read, (Event){.at = pos})) return 0;
    while (pos < end) {
        size_t frame = pos;
        unsigned char kind = clear[pos++];
        uint64_t id, offset = 0, length = 0;
        int well = (kind & 0xF8) == 0x08 && get_varint(clear, end, &pos, &id) &&
                   (!(kind & 4) || get_varint(clear, end, &pos, &offset)) &&
                   (!(kind & 2) || (get_varint(clear, end, &pos, &length) && length <= end - pos));
        if (!well) { /* another frame, or a broken one */
            if (!add_event(read, (Event){.flag = found, .at = frame, .length = end - frame})) return 0;
            read->used = end;
            break;
        }
        if (!(kind & 2)) length = end - pos;
        found = 1;
        Run *run = &read->runs[read->run_count - 1];
        Event *last = run->count ? &read->events[read->event_count - 1] : NULL;
        if (last && last->stream && !last->flag && last->id == id && last->offset + last->length == offset) {
            memmove(clear + read->used, clear + pos, length); /* `last` ends at `used` */
            last->length += length;
            last->flag = kind & 1;
            read->used += length;
        } else {
            Event event = {.stream = 1, .flag = kind & 1, .id = id, .offset = offset, .at = pos, .length = length};
            if (!add_event(read, event)) return 0;
            read->used = pos + length;
        }
        pos += length;
    }
    read->runs[read->run_count - 1].eliciting += found;
    return 1;
}

/* RFC 9000 appendix A.3 */
static uint64_t whole_number(uint64_t truncated, int bits, uint64_t expected) {
    uint64_t window = 1ULL << bits, half = window / 2;
    uint64_t number = (expected & ~(window - 1)) | truncated;
    if (number + half <= expected && number < (1ULL << 62) - window) return number + window;
    if (number > expected + half && number >= window) return number - window;
    return number;
}

/* Read `count` packets into `read`; how many until one has another key phase or reserved bits, or
 * -1 for want of memory and -2 for a fault of OpenSSL. */
static Py_ssize_t unprotect(Keys *self, const Packet *packets, size_t count, size_t cid_size, int phase,
                            uint64_t expected, int64_t largest, unsigned char *samples, Read *read) {
    const unsigned char *masks = samples + count * SAMPLE;
    unsigned char header[1 + MAX_CID + 4], iv[NONCE];
    uint64_t following = UINT64_MAX; /* the number that goes on with the last run */
    if (!make_masks(self, samples, samples + count * SAMPLE, count)) return -2;
    for (size_t i = 0; i < count; i++, masks += SAMPLE) {
        const unsigned char *packet = packets[i].at;
        int first = packet[0] ^ (masks[0] & 0x1F), size, rest;
        if (!(first & KEY_PHASE) != !phase) return (Py_ssize_t)i;
        size_t number_size = (size_t)(first & 3) + 1, head = 1 + cid_size + number_size;
        uint64_t truncated = 0;
        memcpy(header, packet, 1 + cid_size);
        header[0] = (unsigned char)first;
        for (size_t j = 0; j < number_size; j++) {
            header[1 + cid_size + j] = packet[1 + cid_size + j] ^ masks[1 + j];
            truncated = truncated << 8 | header[1 + cid_size + j];
        }
        uint64_t number = whole_number(truncated, 8 * (int)number_size, expected);
        size_t sealed = packets[i].size - head - TAG;
        unsigned char *out = read->clear + read->used;
        nonce(self, number, iv);
        size = 0;
        if (!EVP_DecryptInit_ex(self->aead, NULL, NULL, NULL, iv) ||
            !EVP_CIPHER_CTX_ctrl(self->aead, EVP_CTRL_AEAD_SET_TAG, TAG,
                                 (void *)(packet + packets[i].size - TAG)) ||
            !EVP_DecryptUpdate(self->aead, NULL, &rest, header, (int)head) ||
            (sealed && !EVP_DecryptUpdate(self->aead, out, &size, packet + head, (int)sealed)))
            return -2;
        if (EVP_DecryptFinal_ex(self->aead, out + size, &rest) <= 0) continue; /* forged or damaged */
        int fresh = (int64_t)number > largest;
        if (first & RESERVED) {
            if (!add_run(read, number)) return -1;
            read->runs[read->run_count - 1].first = first;
            return (Py_ssize_t)i + 1;
        }
        if (number >= expected) expected = number + 1;
        if (number == following) {
            read->runs[read->run_count - 1].stop = ++following;
        } else {
            if (!add_run(read, number)) return -1;
            following = fresh ? number + 1 : UINT64_MAX;
        }
        read->runs[read->run_count - 1].first = first;
        if (fresh) largest = (int64_t)number;
        if (!read_frames(read, sealed)) return -1;
    }
    return (Py_ssize_t)count;
}

static PyObject *show_run(const Read *read, const Run *run) {
    PyObject *events = PyList_New((Py_ssize_t)run->count);
    for (size_t i = 0; events && i < run->count; i++) {
        const Event *event = &read->events[run->events + i];
        const char *data = (const char *)read->clear + event->at;
        PyObject *flag = event->flag ? Py_True : Py_False, *shown;
        if (event->stream)
            shown = Py_BuildValue("(KKy#O)", (unsigned long long)event->id, (unsigned long long)event->offset,
                                  data, (Py_ssize_t)event->length, flag);
        else
            shown = Py_BuildValue("(y#O)", data, (Py_ssize_t)event->length, flag);
        if (!shown || PyList_SetItem(events, (Py_ssize_t)i, shown) < 0) Py_CLEAR(events);
    }
    if (!events) return NULL;
    return Py_BuildValue("(KKiiN)", (unsigned long long)run->start, (unsigned long long)run->stop, run->first,
                         run->eliciting, events);
}

static PyObject *keys_open(PyObject *object, PyObject *args) {
    Keys *self = (Keys *)object;
    PyObject *datagrams, *result = NULL, *runs = NULL;
    Py_ssize_t index, cid_size;
    const unsigned char *cid;
    int phase;
    unsigned long long expected;
    long long largest;
    if (!PyArg_ParseTuple(args, "O!ny#iKL", &PyList_Type, &datagrams, &index, &cid, &cid_size, &phase,
                          &expected, &largest))
        return NULL;
    Py_ssize_t items = PyList_Size(datagrams);
    if (index < 0 || index > items || cid_size > MAX_CID || expected >= 1ULL << 62) {
        PyErr_SetString(PyExc_ValueError, "packets that cannot be read");
        return NULL;
    }
    if (!begin(self, 0)) return NULL;
    size_t room = (size_t)(items - index), count = 0, octets = 0;
    if (room > MAX_PACKETS) room = MAX_PACKETS;
    Read read = {0};
    Packet *packets = malloc((room ? room : 1) * sizeof *packets);
    PyObject **held = malloc((room ? room : 1) * sizeof *held); /* others may change the list meanwhile */
    unsigned char *samples = malloc((room ? room : 1) * 2 * SAMPLE);
    if (!packets || !held || !samples) {
        PyErr_NoMemory();
        goto done;
    }
    for (; count < room; count++) {
        char *at;
        Py_ssize_t size;
        PyObject *item = PyList_GetItem(datagrams, index + (Py_ssize_t)count);
        if (!item || PyBytes_AsStringAndSize(item, &at, &size) < 0) goto done;
        const unsigned char *octet = (const unsigned char *)at;
        if (size < 1 + cid_size + 4 + SAMPLE || size > MAX_PACKET || (octet[0] & 0xC0) != 0x40 ||
            memcmp(octet + 1, cid, (size_t)cid_size))
            break;
        Py_INCREF(item);
        held[count] = item;
        packets[count] = (Packet){(unsigned char *)at, (size_t)size};
        memcpy(samples + count * SAMPLE, octet + 1 + cid_size + 4, SAMPLE);
        octets += (size_t)size;
    }
    read.clear = malloc(octets + 1);
    if (!read.clear) {
        PyErr_NoMemory();
        goto done;
    }
    PyThreadState *others = count < FEW ? NULL : PyEval_SaveThread();
    Py_ssize_t taken =
        unprotect(self, packets, count, (size_t)cid_size, phase, expected, largest, samples, &read);
    if (others) PyEval_RestoreThread(others);
    if (taken == -1) {
        PyErr_NoMemory();
    } else if (taken < 0) {
        refuse("OpenSSL cannot open");
    } else if ((runs = PyList_New((Py_ssize_t)read.run_count))) {
        for (size_t i = 0; runs && i < read.run_count; i++) {
            PyObject *run = show_run(&read, &read.runs[i]);
            if (!run || PyList_SetItem(runs, (Py_ssize_t)i, run) < 0) Py_CLEAR(runs);
        }
        if (runs) result = Py_BuildValue("(nN)", index + taken, runs);
    }
done:
    while (count) Py_DECREF(held[--count]);
    free(held);
    free(packets);
    free(samples);
    free(read.clear);
    free(read.runs);
    free(read.events);
    self->busy = 0;
    return result;
}

/* ---- the module */

static PyMethodDef keys_methods[] = {{"seal", keys_seal, METH_VARARGS, NULL},
                                     {"open", keys_open, METH_VARARGS, NULL},
                                     {NULL, NULL, 0, NULL}};

static PyType_Slot keys_slots[] = {
    {Py_tp_new, keys_new}, {Py_tp_dealloc, keys_dealloc}, {Py_tp_methods, keys_methods}, {0, NULL}};

static PyType_Spec keys_spec = {"moqt.quic._packets.Keys", sizeof(Keys), 0, Py_TPFLAGS_DEFAULT, keys_slots};

static int fill_module(PyObject *module) {
    PyObject *type = PyType_FromSpec(&keys_spec);
    int failed = !type || PyModule_AddObjectRef(module, "Keys", type) < 0 ||
                 PyModule_AddIntConstant(module, "VERSION", VERSION) < 0;
    Py_XDECREF(type);
    return failed ? -1 : 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, fill_module}, {0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_packets", NULL, 0, NULL, module_slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__packets(void) { return PyModuleDef_Init(&module); }
