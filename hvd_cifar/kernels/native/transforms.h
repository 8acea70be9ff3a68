// Transforms of tiles, a line at a time, with vector helpers and tile geometry. Compiled once for each instruction set
// (SET, a namespace), with vectors of LANES numbers.
//
// Evaluation points of tiles of 6 x 6 pixels are 0, +-sqrt(1/2), +-sqrt(2) and infinity. The squares are each other's
// inverses, which keeps all numbers near one: rounding errors are half of those with 0, +-1, +-2. Those of tiles of
// 5 x 5 pixels are +-1/2, +-3/2 and infinity.
//
// No inline function of the standard library is used here: of its copies the linker keeps one for the whole program,
// and that could be one that is compiled for these instructions.
#pragma once

#include <cstdint>

#include "winograd.h"

namespace hvd_cifar::SET {
namespace {

#define INLINE static inline __attribute__((always_inline))

using Index = std::ptrdiff_t;
using Vector = float __attribute__((vector_size(LANES * 4), aligned(4)));
using Bits = std::uint32_t __attribute__((vector_size(LANES * 4)));
using Halves = std::uint16_t __attribute__((vector_size(LANES * 2), aligned(2)));
using Half = std::uint16_t;  // a bfloat16's bits

constexpr float A = 0.70710678118654752f, B = 1.41421356237309505f;
INLINE Index least(Index a, Index b) { return a < b ? a : b; }
INLINE Index most(Index a, Index b) { return a > b ? a : b; }

INLINE Vector load(const float* from) { return *reinterpret_cast<const Vector*>(from); }
INLINE void store(float* to, Vector value) { *reinterpret_cast<Vector*>(to) = value; }
INLINE Vector load(const Half* from) {
    const Bits bits = __builtin_convertvector(*reinterpret_cast<const Halves*>(from), Bits) << 16;
    return (Vector)bits;
}
INLINE void store(Half* to, Vector value) {
    // To the nearest, ties to even. Sums of bfloat16 have no NaN whose bits this would carry into the sign.
    const Bits bits = (Bits)value;
    *reinterpret_cast<Halves*>(to) = __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, Halves);
}
// The first `count` numbers, zeros behind them.
template <class T>
INLINE Vector load(const T* from, Index count) {
    if (count >= LANES) return load(from);
    T some[LANES] = {};
    for (Index i = 0; i < count; i++) some[i] = from[i];
    return load(some);
}
template <class T>
INLINE void store(T* to, Vector value, Index count) {
    if (count >= LANES) return store(to, value);
    T some[LANES];
    store(some, value);
    for (Index i = 0; i < count; i++) to[i] = some[i];
}

// Tiles of one kind: the numbers of their lines, and the transforms of a line of inputs, of the kernel (powers of each
// point over its distances to the others), of products, and of gradients, the transpose of the one before.
template <Index TAPS_, Index OUTPUTS_>
struct Sizes {
    static constexpr Index TAPS = TAPS_, OUTPUTS = OUTPUTS_, INPUTS = TAPS + OUTPUTS - 1, POINTS = INPUTS * INPUTS;
};
template <Index TAPS, Index OUTPUTS>
struct Six : Sizes<TAPS, OUTPUTS> {
    INLINE void of_inputs(const Vector* d, Vector* to) {
        const Vector even = d[4] - 2.0f * d[2], odd = A * (d[3] - 2.0f * d[1]);
        const Vector even2 = d[4] - 0.5f * d[2], odd2 = B * (d[3] - 0.5f * d[1]);
        to[0] = d[0] - 2.5f * d[2] + d[4];
        to[1] = even + odd;
        to[2] = even - odd;
        to[3] = even2 + odd2;
        to[4] = even2 - odd2;
        to[5] = d[1] - 2.5f * d[3] + d[5];
    }
};
struct Tile4x3 : Six<3, 4> {
    static constexpr float KERNEL[INPUTS][TAPS] = {
        {1.0f, 0.0f, 0.0f},        {-2.0f / 3, -2.0f / 3 * A, -1.0f / 3}, {-2.0f / 3, 2.0f / 3 * A, -1.0f / 3},
        {1.0f / 6, B / 6, 1.0f / 3}, {1.0f / 6, -B / 6, 1.0f / 3},          {0.0f, 0.0f, 1.0f},
    };
    INLINE void of_products(const Vector* m, Vector* to) {
        const Vector sum = m[1] + m[2], difference = A * (m[1] - m[2]);
        const Vector sum2 = m[3] + m[4], difference2 = B * (m[3] - m[4]);
        to[0] = m[0] + sum + sum2;
        to[1] = difference + difference2;
        to[2] = 0.5f * sum + 2.0f * sum2;
        to[3] = 0.5f * difference + 2.0f * difference2 + m[5];
    }
    INLINE void of_gradients(const Vector* y, Vector* to) {
        const Vector even = y[0] + 0.5f * y[2], odd = A * (y[1] + 0.5f * y[3]);
        const Vector even2 = y[0] + 2.0f * y[2], odd2 = B * (y[1] + 2.0f * y[3]);
        to[0] = y[0];
        to[1] = even + odd;
        to[2] = even - odd;
        to[3] = even2 + odd2;
        to[4] = even2 - odd2;
        to[5] = y[3];
    }
};
struct Tile2x5 : Six<5, 2> {
    static constexpr float KERNEL[INPUTS][TAPS] = {
        {1.0f, 0.0f, 0.0f, 0.0f, 0.0f},
        {-2.0f / 3, -2.0f / 3 * A, -1.0f / 3, -1.0f / 3 * A, -1.0f / 6},
        {-2.0f / 3, 2.0f / 3 * A, -1.0f / 3, 1.0f / 3 * A, -1.0f / 6},
        {1.0f / 6, B / 6, 1.0f / 3, B / 3, 2.0f / 3},
        {1.0f / 6, -B / 6, 1.0f / 3, -B / 3, 2.0f / 3},
        {0.0f, 0.0f, 0.0f, 0.0f, 1.0f},
    };
    INLINE void of_products(const Vector* m, Vector* to) {
        to[0] = m[0] + (m[1] + m[2]) + (m[3] + m[4]);
        to[1] = A * (m[1] - m[2]) + B * (m[3] - m[4]) + m[5];
    }
    INLINE void of_gradients(const Vector* y, Vector* to) {
        const Vector odd = A * y[1], odd2 = B * y[1];
        to[0] = y[0];
        to[1] = y[0] + odd;
        to[2] = y[0] - odd;
        to[3] = y[0] + odd2;
        to[4] = y[0] - odd2;
        to[5] = y[1];
    }
};
struct Tile3x3 : Sizes<3, 3> {
    static constexpr float KERNEL[INPUTS][TAPS] = {
        {-1.0f / 2, -1.0f / 4, -1.0f / 8}, {1.0f / 2, -1.0f / 4, 1.0f / 8},  {1.0f / 6, 1.0f / 4, 3.0f / 8},
        {-1.0f / 6, 1.0f / 4, -3.0f / 8},  {0.0f, 0.0f, 1.0f},
    };
    INLINE void of_inputs(const Vector* d, Vector* to) {
        const Vector even = 0.5f * (d[2] - 2.25f * d[0]), odd = d[3] - 2.25f * d[1];
        const Vector even2 = 1.5f * (d[2] - 0.25f * d[0]), odd2 = d[3] - 0.25f * d[1];
        to[0] = odd + even;
        to[1] = odd - even;
        to[2] = odd2 + even2;
        to[3] = odd2 - even2;
        to[4] = 0.5625f * d[0] - 2.5f * d[2] + d[4];
    }
    INLINE void of_products(const Vector* m, Vector* to) {
        const Vector sum = m[0] + m[1], sum2 = m[2] + m[3];
        to[0] = sum + sum2;
        to[1] = 0.5f * (m[0] - m[1]) + 1.5f * (m[2] - m[3]);
        to[2] = 0.25f * sum + 2.25f * sum2 + m[4];
    }
    INLINE void of_gradients(const Vector* y, Vector* to) {
        const Vector even = y[0] + 0.25f * y[2], odd = 0.5f * y[1];
        const Vector even2 = y[0] + 2.25f * y[2], odd2 = 1.5f * y[1];
        to[0] = even + odd;
        to[1] = even - odd;
        to[2] = even2 + odd2;
        to[3] = even2 - odd2;
        to[4] = y[2];
    }
};

// A tile's first pixel, which may be outside of the image, and which of its pixels are inside: rows from `top` up to
// `bottom`, columns from `left` up to `right`.
struct Place {
    Index image, row, column, top, bottom, left, right;
    bool inside;  // all of them
};
template <Index OUTPUTS>
INLINE Place place_of(const Shape& s, Index tile, Index before, Index side) {
    const Index across = (s.width + OUTPUTS - 1) / OUTPUTS, down = (s.height + OUTPUTS - 1) / OUTPUTS;
    Place p;
    p.image = tile / (across * down);
    const Index within = tile - p.image * across * down;
    p.row = within / across * OUTPUTS - before;
    p.column = within % across * OUTPUTS - before;
    p.top = most(0, -p.row);
    p.left = most(0, -p.column);
    p.bottom = least(side, s.height - p.row);
    p.right = least(side, s.width - p.column);
    p.inside = p.top == 0 && p.left == 0 && p.bottom == side && p.right == side;
    return p;
}

template <class T, class Tile>
void collect(const float* weights, Index parts, const Shape& s, void* kernel) {
    constexpr Index TAPS = Tile::TAPS, INPUTS = Tile::INPUTS;
    const Index in = padded(s.in), out = padded(s.out);
    for (Index c = 0; c < s.in; c++)
        for (Index k = 0; k < s.out; k += LANES) {
            Vector lines[TAPS][INPUTS];
            for (Index j = 0; j < INPUTS; j++) {
                Vector sums[TAPS] = {};
                for (Index i = 0; i < INPUTS; i++) {
                    Vector sum{};
                    for (Index part = 0; part < parts; part++)
                        sum += load(weights + ((part * Tile::POINTS + i * INPUTS + j) * in + c) * out + k);
                    for (Index tap = 0; tap < TAPS; tap++) sums[tap] += Tile::KERNEL[i][tap] * sum;
                }
                for (Index tap = 0; tap < TAPS; tap++) lines[tap][j] = sums[tap];
            }
            for (Index i = 0; i < TAPS; i++)
                for (Index tap = 0; tap < TAPS; tap++) {
                    Vector sum{};
                    for (Index j = 0; j < INPUTS; j++) sum += Tile::KERNEL[j][tap] * lines[i][j];
                    store(static_cast<T*>(kernel) + ((i * TAPS + tap) * s.in + c) * s.out + k, sum, s.out - k);
                }
        }
}

}  // namespace
}  // namespace hvd_cifar::SET
