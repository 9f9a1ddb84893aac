/* The ring all-reduce that gradring is measured against: a float32 sum over TCP, and nothing else. */

#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>

enum {
    TILE_BYTES = 256 << 10,   /* received before it is added, so that it stays in cache */
    SEGMENT_BYTES = 1 << 20,  /* sent or received in one call, at most */
    LOOKS = 1000,             /* in vain, before it sleeps */
    PATIENCE_MS = 10000,
};

static char tile[TILE_BYTES] __attribute__((aligned(64)));

static size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

static void add(float *restrict to, const float *restrict from, size_t count)
{
    for (size_t i = 0; i < count; i++)
        to[i] += from[i];
}

/* Sends one chunk while it receives another one, which it adds to what is there, or puts in place. */
static int exchange(int next, int previous, const char *out, size_t out_bytes, char *in, size_t in_bytes, int adds)
{
    size_t sent = 0, received = 0, carried = 0;
    int looks = 0;
    while (sent < out_bytes || received < in_bytes) {
        struct pollfd awaited[2];
        int moved = 0, waits = 0;
        if (sent < out_bytes) {
            ssize_t n = send(next, out + sent, least(out_bytes - sent, SEGMENT_BYTES), MSG_DONTWAIT | MSG_NOSIGNAL);
            if (n < 0 && errno != EAGAIN)
                return -1;
            if (n < 0)
                awaited[waits++] = (struct pollfd){next, POLLOUT, 0};
            else
                sent += n, moved = 1;
        }
        if (received < in_bytes) {
            size_t left = in_bytes - received;
            char *to = adds ? tile + carried : in + received;
            size_t room = adds ? least(left, TILE_BYTES) - carried : least(left, SEGMENT_BYTES);
            ssize_t n = recv(previous, to, room, MSG_DONTWAIT);
            if (n == 0 || (n < 0 && errno != EAGAIN))
                return -1;
            if (n < 0)
                awaited[waits++] = (struct pollfd){previous, POLLIN, 0};
            else {
                size_t held = adds ? carried + n : (size_t)n;
                size_t whole = adds ? held - held % sizeof(float) : held;
                if (adds) {
                    add((float *)(in + received), (float *)tile, whole / sizeof(float));
                    carried = held - whole;
                    memmove(tile, tile + whole, carried);
                }
                received += whole;
                moved = 1;
            }
        }
        looks = moved ? 0 : looks + 1;
        if (looks > LOOKS && poll(awaited, waits, PATIENCE_MS) <= 0)
            return -1;
    }
    return 0;
}

/* Chunk `index` of `parts`. */
static float *chunk(float *buffer, size_t count, int parts, int index, size_t *bytes)
{
    size_t start = count * index / parts, end = count * (index + 1) / parts;
    *bytes = (end - start) * sizeof(float);
    return buffer + start;
}

/* Reduces blocks of so many elements, one after the other; 0 means all at once. Returns 0, or -1. */
int ring_all_reduce(int next, int previous, int rank, int ranks, float *buffer, size_t count, size_t block)
{
    for (size_t done = 0, size; done < count; done += size) {
        size = block ? least(block, count - done) : count;
        for (int step = 0; step < 2 * (ranks - 1); step++) {
            /* First each rank gets the sum of its own chunk, then those of the others. */
            int adds = step < ranks - 1, index = rank + 2 * ranks - step - (adds ? 1 : 0);
            if (!adds)
                index += ranks - 1;
            size_t out_bytes, in_bytes;
            float *out = chunk(buffer + done, size, ranks, index % ranks, &out_bytes);
            float *in = chunk(buffer + done, size, ranks, (index - 1) % ranks, &in_bytes);
            if (exchange(next, previous, (char *)out, out_bytes, (char *)in, in_bytes, adds))
                return -1;
        }
    }
    return 0;
}
