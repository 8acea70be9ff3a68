// The convolutions of winograd.cc for bfloat16, on processors that sum its products (AVX512-BF16).
//
// Transformed images and weights are bfloat16: products take half the time of float32's, and operands half the memory.
// Rounding the operands makes errors of 1.2% of an output's typical size; rounding the output alone makes 0.2%. Sums are
// float32.
#include "transforms.h"

// Included after the types, since this header declares thousands of names.
#include <immintrin.h>

namespace hvd_cifar::SET {
namespace {

constexpr Index TOGETHER = 8;      // tiles, or channels, of one product, ...
constexpr Index WIDE = 2 * LANES;  // ... and output channels of it, at most: 16 sums, which hide an addition's latency
constexpr Index APART_HALVES = 2 * APART;

// Tiles of a block. With few tiles the values between the transforms stay in the nearest cache. More tiles are faster
// where there are many weights: each block reads all of them from a slower cache, and for a kernel's gradient also
// writes them.
INLINE Index block_of(const Shape& s) { return s.in * s.out <= 128 * 128 ? 16 : 24; }
INLINE Index block_of_sums(const Shape& s) { return s.in * s.out <= 64 * 64 ? 48 : s.in * s.out <= 128 * 128 ? 96 : 384; }

INLINE __m256i rounded(Vector v) { return (__m256i)_mm512_cvtneps_pbh((__m512)v); }
INLINE __m512i rounded(Vector a, Vector b) { return (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a); }
// a0 b0 a1 b1 ...: the order in which the instruction for dot products takes pairs.
INLINE __m512i in_pairs(Vector a, Vector b) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a));
}
INLINE __m512bh pairs(const Half* from) { return (__m512bh)_mm512_loadu_si512(from); }
using Pair = std::int32_t __attribute__((may_alias));
INLINE __m512bh one_pair(const Half* from) {
    return (__m512bh)_mm512_set1_epi32(*reinterpret_cast<const Pair*>(from));
}
INLINE Vector load(const Half* from, __mmask16 lanes) {
    const __m512i bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, from));
    return (Vector)_mm512_slli_epi32(bits, 16);
}

// Where the pixels of a tile are, [SIDE, SIDE]; `zeros` where there are none.
template <Index SIDE>
INLINE void find(const Half* pixels, const Shape& s, Index channels, const Place& p, const Half* zeros,
                 const Half** places) {
    const Index next_row = s.width * channels;
    const Half* corner = pixels + (p.image * s.height + p.row) * next_row + p.column * channels;
#pragma GCC unroll 6
    for (Index i = 0; i < SIDE; i++)
#pragma GCC unroll 6
        for (Index j = 0; j < SIDE; j++) {
            const bool there = i >= p.top && i < p.bottom && j >= p.left && j < p.right;
            places[i * SIDE + j] = there ? corner + i * next_row + j * channels : zeros;
        }
}
// Pixels of a tile, from `channel` up to `end`, and LINE along their columns.
template <Index SIDE, Index INPUTS, void (*LINE)(const Vector*, Vector*)>
INLINE void columns(const Half* const* places, Index channel, Index end, Vector (*lines)[SIDE]) {
    const __mmask16 lanes = (1u << least(end - channel, LANES)) - 1;
    const bool all = end - channel >= LANES;
#pragma GCC unroll 6
    for (Index j = 0; j < SIDE; j++) {
        Vector seen[SIDE], made[INPUTS];
#pragma GCC unroll 6
        for (Index i = 0; i < SIDE; i++) {
            const Half* pixel = places[i * SIDE + j] + channel;
            seen[i] = all ? load(pixel) : load(pixel, lanes);
        }
        LINE(seen, made);
#pragma GCC unroll 6
        for (Index i = 0; i < INPUTS; i++) lines[i][j] = made[i];
    }
}

// Each tile's pixels, transformed, as [POINTS, tiles, channels padded].
template <class Tile>
INLINE void spread(const Half* images, const Shape& s, Index first, Index count, Index point, const Half* zeros,
                   Half* to) {
    constexpr Index INPUTS = Tile::INPUTS;
    const Index wide = padded(s.in);
    for (Index t = 0; t < count; t++) {
        const Half* places[INPUTS * INPUTS];
        find<INPUTS>(images, s, s.in, place_of<Tile::OUTPUTS>(s, first + t, Tile::TAPS / 2, INPUTS), zeros, places);
        for (Index c = 0; c < wide; c += LANES) {
            Vector lines[INPUTS][INPUTS], made[INPUTS];
            columns<INPUTS, INPUTS, Tile::of_inputs>(places, c, s.in, lines);
            Half* target = to + t * wide + c;
#pragma GCC unroll 6
            for (Index i = 0; i < INPUTS; i++) {
                Tile::of_inputs(lines[i], made);
#pragma GCC unroll 6
                for (Index j = 0; j < INPUTS; j++)
                    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target + (i * INPUTS + j) * point), rounded(made[j]));
            }
        }
    }
}

// SIDE x SIDE pixels of each tile and of channels from `channel` up to `end`, transformed by LINE, two tiles side by
// side, as [POINTS, tiles / 2, channels padded, 2].
template <class Tile, Index SIDE, void (*LINE)(const Vector*, Vector*)>
INLINE void spread_pairs(const Half* pixels, const Shape& s, Index channels, Index channel, Index end, Index first,
                         Index count, Index point, const Half* zeros, Half* to) {
    constexpr Index INPUTS = Tile::INPUTS;
    const Index wide = padded(end - channel);
    for (Index t = 0; t < count; t += 2) {
        constexpr Index OUTPUTS = Tile::OUTPUTS, before = SIDE == INPUTS ? Tile::TAPS / 2 : 0;
        const Place p = place_of<OUTPUTS>(s, first + t, before, SIDE);
        Place next = place_of<OUTPUTS>(s, first + t + 1, before, SIDE);
        if (t + 1 == count) next.bottom = next.top = 0;  // no second tile: zeros
        const Half *places[SIDE * SIDE], *others[SIDE * SIDE];
        find<SIDE>(pixels, s, channels, p, zeros, places);
        find<SIDE>(pixels, s, channels, next, zeros, others);
        for (Index c = 0; c < wide; c += LANES) {
            Vector lines[INPUTS][SIDE], beside[INPUTS][SIDE];
            columns<SIDE, INPUTS, LINE>(places, channel + c, end, lines);
            columns<SIDE, INPUTS, LINE>(others, channel + c, end, beside);
            Half* target = to + t * wide + 2 * c;
#pragma GCC unroll 6
            for (Index i = 0; i < INPUTS; i++) {
                Vector one[INPUTS], other[INPUTS];
                LINE(lines[i], one);
                LINE(beside[i], other);
#pragma GCC unroll 6
                for (Index j = 0; j < INPUTS; j++)
                    _mm512_storeu_si512(target + (i * INPUTS + j) * point, in_pairs(one[j], other[j]));
            }
        }
    }
}

// Sums [TOGETHER, VECTORS vectors] += pairs of `left`, `stride` halves apart, times those of `right`; `inner` each.
template <Index VECTORS>
INLINE void product(const Half* left, Index next_left, Index stride, const Half* right, Index next_right, Index inner,
                    Vector (*sums)[VECTORS]) {
    for (Index c = 0; c < inner; c++) {
        __m512bh other[VECTORS];
#pragma GCC unroll 2
        for (Index v = 0; v < VECTORS; v++) other[v] = pairs(right + c * next_right + 2 * v * LANES);
#pragma GCC unroll 8
        for (Index t = 0; t < TOGETHER; t++) {
            const __m512bh one = one_pair(left + c * next_left + t * stride);
#pragma GCC unroll 2
            for (Index v = 0; v < VECTORS; v++)
                sums[t][v] = (Vector)_mm512_dpbf16_ps((__m512)sums[t][v], one, other[v]);
        }
    }
}

// A point's tiles [count, in padded] times weights [in / 2, VECTORS vectors, 2] -> [count, VECTORS vectors].
template <Index VECTORS>
INLINE void products(const Half* tiles, Index in, const Half* weights, Index count, float* to) {
    for (Index t = 0; t < count; t += TOGETHER) {
        Vector sums[TOGETHER][VECTORS] = {};
        product<VECTORS>(tiles + t * padded(in), 2, padded(in), weights, 2 * VECTORS * LANES, (in + 1) / 2, sums);
#pragma GCC unroll 8
        for (Index i = 0; i < TOGETHER; i++)
#pragma GCC unroll 2
            for (Index v = 0; v < VECTORS; v++) store(to + ((t + i) * VECTORS + v) * LANES, sums[i][v]);
    }
}

// A point's weights [in, out] += its tiles [pairs, in, 2] times gradients [pairs, out, 2].
template <Index VECTORS>
INLINE void outers(const Half* tiles, Index in, const Half* gradients, Index out, Index pairs, float* weights) {
    for (Index c = 0; c < in; c += TOGETHER) {
        Vector sums[TOGETHER][VECTORS];
#pragma GCC unroll 8
        for (Index i = 0; i < TOGETHER; i++)
#pragma GCC unroll 2
            for (Index v = 0; v < VECTORS; v++) sums[i][v] = load(weights + (c + i) * out + v * LANES);
        product<VECTORS>(tiles + 2 * c, 2 * in, 2, gradients, 2 * out, pairs, sums);
#pragma GCC unroll 8
        for (Index i = 0; i < TOGETHER; i++)
#pragma GCC unroll 2
            for (Index v = 0; v < VECTORS; v++) store(weights + (c + i) * out + v * LANES, sums[i][v]);
    }
}

// Results of `count` tiles and of channels from `channel` on, VECTORS vectors of them.
template <class Tile, Index VECTORS>
INLINE void gather(const float* made, Index point, const Shape& s, Index first, Index count, Index channel,
                   Half* outputs) {
    constexpr Index OUTPUTS = Tile::OUTPUTS, INPUTS = Tile::INPUTS;
    const Index next_row = s.width * s.out, left = s.out - channel;
    const __mmask32 lanes = left >= WIDE ? ~0u : (1u << left) - 1;
    // Results that fill whole cache lines are stored past the cache, which then keeps values that are used sooner.
    const bool past = (s.out % WIDE == 0 || s.out == LANES) && reinterpret_cast<std::uintptr_t>(outputs) % 64 == 0;
    for (Index t = 0; t < count; t++) {
        const Place p = place_of<OUTPUTS>(s, first + t, 0, OUTPUTS);
        Half* corner = outputs + (p.image * s.height + p.row) * next_row + p.column * s.out + channel;
        Vector lines[VECTORS][OUTPUTS][INPUTS], results[VECTORS][OUTPUTS];
#pragma GCC unroll 2
        for (Index v = 0; v < VECTORS; v++) {
            const float* from = made + (t * VECTORS + v) * LANES;
#pragma GCC unroll 6
            for (Index j = 0; j < INPUTS; j++) {
                Vector seen[INPUTS];
#pragma GCC unroll 6
                for (Index i = 0; i < INPUTS; i++) seen[i] = load(from + (i * INPUTS + j) * point);
                Tile::of_products(seen, results[0]);
#pragma GCC unroll 4
                for (Index i = 0; i < OUTPUTS; i++) lines[v][i][j] = results[0][i];
            }
        }
#pragma GCC unroll 4
        for (Index i = 0; i < OUTPUTS; i++) {
            if (i >= p.bottom) break;
#pragma GCC unroll 2
            for (Index v = 0; v < VECTORS; v++) Tile::of_products(lines[v][i], results[v]);
#pragma GCC unroll 4
            for (Index j = 0; j < OUTPUTS; j++) {
                if (j >= p.right) break;
                Half* pixel = corner + i * next_row + j * s.out;
                if constexpr (VECTORS == 1) {
                    if (past)
                        _mm256_stream_si256(reinterpret_cast<__m256i*>(pixel), rounded(results[0][j]));
                    else
                        _mm256_mask_storeu_epi16(pixel, lanes, rounded(results[0][j]));
                } else {
                    if (past)
                        _mm512_stream_si512(reinterpret_cast<__m512i*>(pixel), rounded(results[0][j], results[1][j]));
                    else
                        _mm512_mask_storeu_epi16(pixel, lanes, rounded(results[0][j], results[1][j]));
                }
            }
        }
    }
}

// Weights in the order of their use: [POINTS, padded(in) / 2, WIDE, 2] for each WIDE output channels; the last ones may
// be half as many.
template <class Tile>
void transform(const void* kernel, const Shape& s, float* to) {
    constexpr Index TAPS = Tile::TAPS, INPUTS = Tile::INPUTS, POINTS = Tile::POINTS;
    constexpr auto& KERNEL = Tile::KERNEL;
    const Index in = padded(s.in), out = padded(s.out);
    Half* weights = reinterpret_cast<Half*>(to);
    for (Index c = 0; c < in; c += 2)
        for (Index k = 0; k < out; k += LANES) {
            Vector made[2][POINTS];
            for (Index one = 0; one < 2; one++) {
                Vector seen[TAPS][TAPS], lines[INPUTS][TAPS] = {};
                for (Index i = 0; i < TAPS; i++)
                    for (Index j = 0; j < TAPS; j++) {
                        const bool there = c + one < s.in && k < s.out;
                        const Half* all = static_cast<const Half*>(kernel);
                        const Half* from = all + ((i * TAPS + j) * s.in + c + one) * s.out + k;
                        seen[i][j] = there ? load(from, s.out - k) : Vector{};
                    }
                for (Index i = 0; i < INPUTS; i++)
                    for (Index j = 0; j < TAPS; j++)
                        for (Index tap = 0; tap < TAPS; tap++) lines[i][j] += KERNEL[i][tap] * seen[tap][j];
                for (Index i = 0; i < INPUTS; i++)
                    for (Index j = 0; j < INPUTS; j++) {
                        Vector sum{};
                        for (Index tap = 0; tap < TAPS; tap++) sum += KERNEL[j][tap] * lines[i][tap];
                        made[one][i * INPUTS + j] = sum;
                    }
            }
            const Index chunk = k / WIDE * WIDE, wide = least(out - chunk, WIDE);
            Half* to_here = weights + chunk * POINTS * in + 2 * (k - chunk);
            for (Index p = 0; p < POINTS; p++)
                _mm512_storeu_si512(to_here + (p * in + c) * wide, in_pairs(made[0][p], made[1][p]));
        }
}

template <class Tile>
void forward(const void* images, const float* transformed, const Shape& s, Index first, Index last, void* outputs,
             float* scratch) {
    constexpr Index POINTS = Tile::POINTS;
    const Index block = block_of(s), in = padded(s.in), out = padded(s.out);
    const Index point = block * in + APART_HALVES, made_point = block * least(out, WIDE) + APART;
    const Half* weights = reinterpret_cast<const Half*>(transformed);
    float* made = scratch;
    Half* tiles = reinterpret_cast<Half*>(scratch + POINTS * made_point);
    Half* zeros = tiles + POINTS * point;
    for (Index c = 0; c < in; c++) zeros[c] = 0;
    for (Index f = first; f < last; f += block) {
        const Index count = least(block, last - f);
        spread<Tile>(static_cast<const Half*>(images), s, f, count, point, zeros, tiles);
        for (Index k = 0; k < out; k += WIDE) {
            const Half* weight = weights + k * POINTS * in;
            if (out - k >= WIDE) {
                for (Index p = 0; p < POINTS; p++)
                    products<2>(tiles + p * point, s.in, weight + p * in * WIDE, count, made + p * made_point);
                gather<Tile, 2>(made, made_point, s, f, count, k, static_cast<Half*>(outputs));
            } else {
                for (Index p = 0; p < POINTS; p++)
                    products<1>(tiles + p * point, s.in, weight + p * in * LANES, count, made + p * made_point);
                gather<Tile, 1>(made, made_point, s, f, count, k, static_cast<Half*>(outputs));
            }
        }
    }
    _mm_sfence();  // completes the stores past the cache before another thread reads the outputs
}

template <class Tile>
void gradient(const void* images, const void* gradients, const Shape& s, Index first, Index last, Index channel,
              Index end, float* weights, float* scratch) {
    constexpr Index INPUTS = Tile::INPUTS, OUTPUTS = Tile::OUTPUTS, POINTS = Tile::POINTS;
    const Index block = block_of_sums(s), here = padded(end - channel), in = padded(s.in), out = padded(s.out);
    const Index point = block * here + APART_HALVES, change_point = block * out + APART_HALVES;
    Half* tiles = reinterpret_cast<Half*>(scratch);
    Half* changes = tiles + POINTS * point;
    Half* zeros = changes + POINTS * change_point;
    for (Index c = 0; c < most(in, out); c++) zeros[c] = 0;
    for (Index f = first; f < last; f += block) {
        const Index count = least(block, last - f), two = (count + 1) / 2;
        spread_pairs<Tile, INPUTS, Tile::of_inputs>(static_cast<const Half*>(images), s, s.in, channel, end, f, count,
                                                    point, zeros, tiles);
        spread_pairs<Tile, OUTPUTS, Tile::of_gradients>(static_cast<const Half*>(gradients), s, s.out, 0, s.out, f,
                                                        count, change_point, zeros, changes);
        for (Index p = 0; p < POINTS; p++)
            for (Index k = 0; k < out; k += WIDE) {
                const Half *tile = tiles + p * point, *change = changes + p * change_point + 2 * k;
                float* sums = weights + (p * in + channel) * out + k;
                if (out - k >= WIDE)
                    outers<2>(tile, here, change, out, two, sums);
                else
                    outers<1>(tile, here, change, out, two, sums);
            }
    }
}

template <class Tile>
std::size_t scratch_of(const Shape& s) {
    const Index in = padded(s.in), out = padded(s.out), block = block_of(s), sums = block_of_sums(s);
    return most(in, out) + Tile::POINTS * most(block * (in / 2 + WIDE) + 2 * APART, sums * (in + out) / 2 + 2 * APART);
}

template <class Tile>
Functions of() {
    return {transform<Tile>, forward<Tile>, gradient<Tile>, collect<Half, Tile>, scratch_of<Tile>};
}

}  // namespace

Functions functions(Index taps, Index side) {
    return taps == 5 ? of<Tile2x5>() : side == 3 ? of<Tile3x3>() : of<Tile4x3>();
}

}  // namespace hvd_cifar::SET
