/* Copies of host memory by several threads, without Python's lock.
 *
 * A pool belongs to one user at a time: pool_start hands a job over, pool_finish takes part in it and waits for its
 * end. Helpers take pieces of the job by one atomic counter, so nobody waits for a helper that is slow to wake; the
 * caller can copy everything alone. No lock is held anywhere.
 *
 * Plain C for ctypes: no header of Python's, so one build serves every version of it. Linux only (futex).
 */
#define _GNU_SOURCE
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define RELAX() _mm_pause()
#elif defined(__aarch64__)
#define RELAX() __asm__ __volatile__("yield")
#else
#define RELAX() ((void)0)
#endif

/* A helper is worth waking for so many bytes, and none for less than the second number: that is copied before one is
 * awake. */
#define BYTES_PER_HELPER ((size_t)128 << 10)
#define LEAST_WOKEN_FOR ((size_t)512 << 10)
#define LEAST_PIECE ((size_t)32 << 10)
#define MOST_PIECE ((size_t)512 << 10)
#define PIECES_PER_THREAD 4
/* Helpers that one waker wakes: to wake one takes microseconds in a virtual machine, so those woken wake others. */
#define WOKEN_AT_ONCE 2
#define SPIN_NANOSECONDS 200000
#define STREAMED_BYTES 4096

typedef struct {
    const char *source;
    char *target;
    size_t nbytes;
} piece;

typedef struct {
    /* Number of pieces in the upper half, the next one to take in the lower: one word, so that a helper that comes
     * late never counts the pieces of one job by the number of another. */
    _Alignas(64) _Atomic uint64_t ticket;
    _Alignas(64) _Atomic uint32_t left;
    _Alignas(64) _Atomic uint32_t wake;
    _Atomic uint32_t sleepers;
    _Atomic int32_t wanted;
    _Atomic uint32_t waiting;
    _Atomic uint32_t closing;
    piece *pieces;
    size_t capacity;
    pthread_t *threads;
    _Atomic int32_t joined;
    int helpers;
    int spinners;
    long spin;
} pool;

static long nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000L + now.tv_nsec;
}

static void futex_wait(_Atomic uint32_t *word, uint32_t seen) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word, int count) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
}

static int has_work(pool *p) {
    uint64_t ticket = atomic_load(&p->ticket);
    return (uint32_t)ticket < (uint32_t)(ticket >> 32);
}

/* Pieces until none is left to take; others may still be copying theirs then. */
static void work(pool *p) {
    while (has_work(p)) {
        uint64_t ticket = atomic_fetch_add(&p->ticket, 1);
        uint32_t number = (uint32_t)ticket;
        if (number >= (uint32_t)(ticket >> 32)) return;
        piece *taken = &p->pieces[number];
        memcpy(taken->target, taken->source, taken->nbytes);
        if (atomic_fetch_sub(&p->left, 1) == 1 && atomic_load(&p->waiting)) futex_wake(&p->left, 1);
    }
}

static void wake_some(pool *p) {
    if (!atomic_load(&p->sleepers)) return;
    int32_t before = atomic_fetch_sub(&p->wanted, WOKEN_AT_ONCE);
    if (before > 0) futex_wake(&p->wake, before < WOKEN_AT_ONCE ? before : WOKEN_AT_ONCE);
}

/* Whether work came while it was looked for. */
static int spin(pool *p) {
    long until = nanoseconds() + p->spin;
    do {
        for (int turn = 0; turn < 64; turn++) {
            if (has_work(p)) return 1;
            RELAX();
        }
    } while (nanoseconds() < until);
    return 0;
}

static void *help(void *argument) {
    pool *p = argument;
    int spins = p->spin && atomic_fetch_add(&p->joined, 1) < p->spinners;
    while (!atomic_load(&p->closing)) {
        if (has_work(p)) {
            wake_some(p);
            work(p);
        }
        if (spins && spin(p)) continue;
        uint32_t seen = atomic_load(&p->wake);
        /* Either the starter sees this sleeper, or the sleeper sees the job: both orders are sequentially consistent. */
        atomic_fetch_add(&p->sleepers, 1);
        if (!has_work(p) && !atomic_load(&p->closing)) futex_wait(&p->wake, seen);
        atomic_fetch_sub(&p->sleepers, 1);
    }
    return NULL;
}

/* Raised whenever a function below changes what it takes: a library that was built before is not called then. */
int copies_version(void) { return 1; }

/* As many helpers as can be started, down to none; NULL without memory. So many of them, `spinners`, look for the next
 * job for `spin` nanoseconds before they sleep. */
pool *pool_open(int helpers, int spinners, long spin) {
    pool *p = aligned_alloc(64, (sizeof(pool) + 63) / 64 * 64);
    if (!p) return NULL;
    memset(p, 0, sizeof(pool));
    p->spinners = spinners;
    p->spin = spin;
    p->threads = calloc((size_t)helpers + 1, sizeof(pthread_t));
    if (!p->threads) helpers = 0;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for Python's threads */
    while (p->helpers < helpers && pthread_create(&p->threads[p->helpers], NULL, help, p) == 0) {
        pthread_setname_np(p->threads[p->helpers], "prefetch-copy");
        p->helpers++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return p;
}

/* Take part in the job under way, and wait for its end; all bytes have arrived then. */
void pool_finish(pool *p) {
    work(p);
    long until = nanoseconds() + SPIN_NANOSECONDS;
    uint32_t left;
    while ((left = atomic_load(&p->left))) {
        for (int turn = 0; turn < 64; turn++) RELAX();
        if (nanoseconds() < until) continue;
        atomic_store(&p->waiting, 1);
        if ((left = atomic_load(&p->left))) futex_wait(&p->left, left);
        atomic_store(&p->waiting, 0);
    }
}

/* Begin to copy nbytes[i] from sources[i] to target + offsets[i], for all i; pool_finish must follow. The arrays are
 * not needed any more when it returns. */
void pool_start(pool *p, int n, const uint64_t *sources, const uint64_t *offsets, const uint64_t *nbytes,
                uint64_t target) {
    if (atomic_load(&p->left)) pool_finish(p); /* of a caller that was interrupted */
    size_t total = 0, count = 0;
    for (int i = 0; i < n; i++) total += nbytes[i];
    size_t size = total / (size_t)(PIECES_PER_THREAD * (p->helpers + 1));
    size = size < LEAST_PIECE ? LEAST_PIECE : size > MOST_PIECE ? MOST_PIECE : (size + 4095) / 4096 * 4096;
    for (int i = 0; i < n; i++) count += (nbytes[i] + size - 1) / size;
    if (count > p->capacity) {
        free(p->pieces);
        p->pieces = malloc(count * sizeof(piece));
        p->capacity = p->pieces ? count : 0;
    }
    if (!p->pieces) {
        for (int i = 0; i < n; i++) memcpy((char *)(target + offsets[i]), (const char *)sources[i], nbytes[i]);
        return;
    }
    piece *next = p->pieces;
    for (int i = 0; i < n; i++) {
        for (size_t at = 0; at < nbytes[i]; at += size) {
            next->source = (const char *)sources[i] + at;
            next->target = (char *)(target + offsets[i] + at);
            next->nbytes = nbytes[i] - at < size ? nbytes[i] - at : size;
            next++;
        }
    }
    size_t worth = total < LEAST_WOKEN_FOR ? 0 : total / BYTES_PER_HELPER;
    atomic_store(&p->left, (uint32_t)count);
    atomic_store(&p->wanted, (int32_t)(worth < (size_t)p->helpers ? worth : (size_t)p->helpers));
    atomic_store(&p->ticket, (uint64_t)count << 32);
    if (worth && atomic_load(&p->sleepers)) {
        atomic_fetch_add(&p->wake, 1);
        wake_some(p);
    }
}

void pool_close(pool *p) {
    pool_finish(p);
    atomic_store(&p->closing, 1);
    atomic_fetch_add(&p->wake, 1);
    futex_wake(&p->wake, INT32_MAX);
    for (int i = 0; i < p->helpers; i++) pthread_join(p->threads[i], NULL);
    free(p->threads);
    free(p->pieces);
    free(p);
}

#if defined(__x86_64__)
/* Stores that do not read the target's cache lines first: a third less traffic where targets are beyond the caches. */
__attribute__((target("avx2"))) static void stream(char *target, const char *source, size_t nbytes) {
    size_t head = (32 - ((uintptr_t)target & 31)) & 31;
    memcpy(target, source, head);
    target += head, source += head, nbytes -= head;
    for (; nbytes >= 128; nbytes -= 128, target += 128, source += 128) {
        __m256i a = _mm256_loadu_si256((const __m256i *)source);
        __m256i b = _mm256_loadu_si256((const __m256i *)(source + 32));
        __m256i c = _mm256_loadu_si256((const __m256i *)(source + 64));
        __m256i d = _mm256_loadu_si256((const __m256i *)(source + 96));
        _mm256_stream_si256((__m256i *)target, a);
        _mm256_stream_si256((__m256i *)(target + 32), b);
        _mm256_stream_si256((__m256i *)(target + 64), c);
        _mm256_stream_si256((__m256i *)(target + 96), d);
    }
    memcpy(target, source, nbytes);
}
#endif

/* The same by the calling thread alone, from start to end. `streaming`: past the caches, for targets that do not fit them. */
void copy_alone(int n, const uint64_t *sources, const uint64_t *offsets, const uint64_t *nbytes, uint64_t target,
                int streaming) {
#if defined(__x86_64__)
    streaming = streaming && __builtin_cpu_supports("avx2");
#else
    (void)streaming;
#endif
    for (int i = 0; i < n; i++) {
        char *to = (char *)(target + offsets[i]);
        const char *from = (const char *)sources[i];
#if defined(__x86_64__)
        if (streaming && nbytes[i] >= STREAMED_BYTES) {
            stream(to, from, nbytes[i]);
            continue;
        }
#endif
        memcpy(to, from, nbytes[i]);
    }
#if defined(__x86_64__)
    if (streaming) _mm_sfence(); /* whoever is told of the bytes sees them */
#endif
}
