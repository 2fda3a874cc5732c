"""CUDA source of the kernels for tables: no headers, and valid C++ as well, so that tests run it on the CPU.

Every argument has eight bytes: an address or an int64. Kernels that move rows serve several tables of one index: for
each of them the table's address, that of the rows on the device, and how wide a row is, in pieces of so many bytes.
"""

from __future__ import annotations

from prefetchpipe.tables.index import PAD

__all__ = ["MOST_TABLES", "NAMES", "NO_KEY", "PART", "SOURCE", "SUMMED", "TOTALLED", "WIDTHS"]

MOST_TABLES = 6
"""Tables of a launch: the rows, three states and two numbers a row."""

NO_KEY = (1 << 31) - 1
"""Key of an id that is no row, behind all others; tables with this many rows or more have keys of eight bytes."""

PART = 32
"""Occurrences of an id that one thread adds up; a frequent id has several parts, whose sums are added up then."""

WIDTHS = {16: "uint4", 8: "u64", 4: "u32", 2: "u16", 1: "u8"}
SUMMED = ("float", "double", "int", "i64")
TOTALLED = ("float", "double")
_KEYS = {4: "int", 8: "i64"}


def _four(text: str) -> str:
    return ", ".join(text % {"k": k} for k in range(MOST_TABLES))


# `fault` is page-locked: [state, id, position]. Of several bad ids the first thread to get there reports its own.
_COMMON = f"""
typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
#define PAD {PAD}LL
#define NO_KEY {NO_KEY}
#define PART {PART}
#define UNROLL 4
#define STEP ((i64)gridDim.x * blockDim.x)
#define FIRST ((i64)blockIdx.x * blockDim.x + threadIdx.x)

#define TABLES i64 tables, {_four("char* table%(k)d, char* rows%(k)d, i64 width%(k)d, i64 size%(k)d")}
#define EACH_TABLE(MOVE) \\
    char* all_tables[] = {{{_four("table%(k)d")}}}; \\
    char* all_rows[] = {{{_four("rows%(k)d")}}}; \\
    i64 widths[] = {{{_four("width%(k)d")}}}, sizes[] = {{{_four("size%(k)d")}}}; \\
    for (int k = 0; k < tables; ++k) {{ \\
        char *table = all_tables[k], *rows = all_rows[k]; \\
        i64 width = widths[k]; \\
        switch (sizes[k]) {{ \\
            {" ".join(f"case {size}: MOVE({kind}); break;" for size, kind in WIDTHS.items())} \\
        }} \\
    }}
"""

_HELP = """
__device__ void report(i64* fault, i64 id, i64 position) {
    if (atomicCAS((u64*)fault, 0ULL, 1ULL) == 0ULL) {
        volatile i64* said = fault;
        said[1] = id;
        said[2] = position;
        __threadfence_system();
        said[0] = 2;
    }
}

// A division of 64 bits takes several times as long as one of 32.
__device__ i64 row_of(i64 i, i64 width) {
    return (u64)(i | width) >> 32 ? i / width : (i64)((u32)i / (u32)width);
}
"""

# Where there is an `order`, it sorts the ids; every position is one of the ids as they were given.
_MOVE = """
template <class T> __device__ void gather_rows(const T* table, T* out, i64 width,
    const i64* ids, const i64* order, i64 count, i64 limit, i64* fault) {
    i64 total = count * width, step = STEP;
    for (i64 first = FIRST; first < total; first += step * UNROLL) {
        T piece[UNROLL];
        i64 to[UNROLL];
        #pragma unroll
        for (int k = 0; k < UNROLL; ++k) {
            i64 i = first + k * step;
            piece[k] = T();
            if (i >= total) continue;
            i64 at = row_of(i, width), column = i - at * width;
            i64 position = order ? order[at] : at, id = ids[position];
            to[k] = position * width + column;
            if (id == PAD) continue;
            if (id < 0 || id >= limit) { report(fault, id, position); continue; }
            piece[k] = table[id * width + column];
        }
        #pragma unroll
        for (int k = 0; k < UNROLL; ++k) {
            if (first + k * step < total) out[to[k]] = piece[k];
        }
    }
}

extern "C" __global__ void gather(
    const i64* ids, const i64* order, i64 count, i64 limit, i64* fault, TABLES) {
    #define GATHER(T) gather_rows<T>((const T*)table, (T*)rows, width, ids, order, count, limit, fault)
    EACH_TABLE(GATHER)
}

// With an order the last of equal ids is the one that is written; without, they are distinct. Only those are counted.
template <class T> __device__ void scatter_rows(T* table, const T* values, i64 width,
    const i64* ids, const i64* order, i64 count, i64 limit, i64* fault) {
    i64 total = count * width, step = STEP;
    for (i64 i = FIRST; i < total; i += step) {
        i64 at = row_of(i, width), column = i - at * width;
        i64 position = order ? order[at] : at, id = ids[position];
        if (id == PAD) continue;
        if (id < 0 || id >= limit) { report(fault, id, position); continue; }
        if (order && at + 1 < count && ids[order[at + 1]] == id) continue;
        table[id * width + column] = values[position * width + column];
    }
}

extern "C" __global__ void scatter(
    const i64* ids, const i64* order, i64 count, i64 limit, i64* fault, float* counts, TABLES) {
    #define SCATTER(T) scatter_rows<T>((T*)table, (const T*)rows, width, ids, order, count, limit, fault)
    EACH_TABLE(SCATTER)
    i64 step = STEP;
    for (i64 i = FIRST; counts && i < count; i += step) {
        if (ids[i] >= 0 && ids[i] < limit) counts[ids[i]] += 1;
    }
}

// Rows on the device take the values of those others that have the same id: the first of its keys, which ascend.
template <class T, class K> __device__ void patch_rows(T* rows, const T* others, i64 width,
    const i64* ids, i64 count, const K* keys, i64 other_count) {
    i64 total = count * width, step = STEP;
    for (i64 i = FIRST; i < total; i += step) {
        i64 at = row_of(i, width), id = ids[at], low = 0, high = other_count;
        if (id == PAD) continue;
        while (low < high) {
            i64 middle = (low + high) / 2;
            if (keys[middle] < id) low = middle + 1; else high = middle;
        }
        if (low < other_count && keys[low] == id) rows[i] = others[low * width + i - at * width];
    }
}

#define PATCH(T) patch_rows<T>((T*)table, (const T*)rows, width, ids, count, keys, other_count)
"""

_PATCH = """
extern "C" __global__ void patch_%(bytes)d(
    const i64* ids, i64 count, const %(type)s* keys, i64 other_count, TABLES) {
    EACH_TABLE(PATCH)
}
"""

# One thread adds up all occurrences of an id, in their order: the same sum on every run.
_ADD = """
extern "C" __global__ void add_%(type)s(
    %(type)s* table, const i64* ids, const i64* order, const %(type)s* values,
    i64 count, i64 width, i64 limit, i64* fault) {
    i64 total = count * width, step = STEP;
    for (i64 i = FIRST; i < total; i += step) {
        i64 at = row_of(i, width), column = i - at * width, id = ids[order[at]];
        if (id == PAD) continue;
        if (id < 0 || id >= limit) { report(fault, id, order[at]); continue; }
        if (at > 0 && ids[order[at - 1]] == id) continue;
        %(type)s sum = table[id * width + column];
        for (i64 next = at; next < count && ids[order[next]] == id; ++next) sum += values[order[next] * width + column];
        table[id * width + column] = sum;
    }
}
"""

# Distinct ids: keys, sorted by torch; then for each the span of those that are equal. The first one stands for its id.
_NARROW = """
extern "C" __global__ void narrow(const i64* ids, int* keys, i64 count, i64 limit, i64* fault) {
    i64 step = STEP;
    for (i64 i = FIRST; i < count; i += step) {
        i64 id = ids[i];
        bool is_row = id >= 0 && id < limit;
        keys[i] = is_row ? (int)id : NO_KEY;
        if (fault && !is_row && id != PAD) report(fault, id, i);
    }
}
"""

_DISTINCT = """
extern "C" __global__ void place_%(bytes)d(
    const %(type)s* keys, const i64* order, i64 count, i64* ids, i64* inverse, i64* spans) {
    i64 step = STEP;
    for (i64 i = FIRST; i < count; i += step) {
        %(type)s key = keys[i];
        i64 start = i, end = i + 1;
        for (i64 low = 0; low < start;) {
            i64 middle = (low + start) / 2;
            if (keys[middle] < key) low = middle + 1; else start = middle;
        }
        for (i64 high = count; end < high;) {
            i64 middle = (end + high) / 2;
            if (key < keys[middle]) high = middle; else end = middle + 1;
        }
        inverse[order[i]] = start;
        spans[i] = start | end << 32;
        ids[i] = i == start ? %(id)s : PAD;
    }
}
"""
_ID_OF = {4: "key == NO_KEY ? PAD : (i64)key", 8: "key"}

# Gradients of all occurrences summed by row. Parts start every PART occurrences of a row; of rows with several parts
# at most two begin within any PART positions, one that goes on and one that starts, hence two places for each.
_TOTAL = """
#define START(span) ((span) & 0xffffffffLL)
#define END(span) ((span) >> 32)

extern "C" __global__ void parts_%(type)s(
    const %(type)s* values, const i64* order, const i64* spans, i64 count, i64 width, %(type)s* parts, %(type)s* out) {
    i64 total = count * width, step = STEP;
    for (i64 i = FIRST; i < total; i += step) {
        i64 at = row_of(i, width), column = i - at * width, start = START(spans[at]), end = END(spans[at]);
        if (at != start) out[i] = 0;
        if ((at - start) %% PART) continue;
        i64 stop = at + PART < end ? at + PART : end;
        %(type)s sum = 0;
        #pragma unroll 4
        for (i64 next = at; next < stop; ++next) sum += values[order[next] * width + column];
        if (end - start <= PART) out[i] = sum;
        else parts[(at / PART * 2 + (at == start)) * width + column] = sum;
    }
}

extern "C" __global__ void totals_%(type)s(
    const %(type)s* parts, const i64* spans, i64 count, i64 width, %(type)s* out) {
    i64 total = count * width, step = STEP;
    for (i64 i = FIRST; i < total; i += step) {
        i64 place = row_of(i, width), column = i - place * width, start = START(spans[place]), end = END(spans[place]);
        if (place != start || end - start <= PART) continue;
        %(type)s sum = 0;
        for (i64 at = start; at < end; at += PART) sum += parts[(at / PART * 2 + (at == start)) * width + column];
        out[i] = sum;
    }
}
"""

SOURCE = (
    _COMMON
    + _HELP
    + _MOVE
    + "".join(_ADD % {"type": name} for name in SUMMED)
    + _NARROW
    + "".join(_PATCH % {"bytes": size, "type": name} for size, name in _KEYS.items())
    + "".join(_DISTINCT % {"bytes": size, "type": name, "id": _ID_OF[size]} for size, name in _KEYS.items())
    + "".join(_TOTAL % {"type": name} for name in TOTALLED)
)
NAMES = (
    *("gather", "scatter", "narrow"),
    *(f"add_{name}" for name in SUMMED),
    *(f"{what}_{size}" for size in _KEYS for what in ("patch", "place")),
    *(f"{what}_{name}" for name in TOTALLED for what in ("parts", "totals")),
)
