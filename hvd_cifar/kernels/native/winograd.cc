// Winograd convolutions of float32 (Winograd 1980; Lavin and Gray 2015), tile by tile within a core's cache.
//
// 4 x 4 outputs of a 3 x 3 kernel take 144 multiplications directly. They take 36 if the 6 x 6 inputs and the kernel
// are transformed first, and the products after. A block of tiles stays in a core's cache from its pixels to its
// outputs, which keeps the transforms cheap. kernels/winograd.py computes 5 x 5 kernels, by larger tiles.
#include "transforms.h"

namespace hvd_cifar::SET {
namespace {

constexpr Index FEW_CHANNELS = 64, TILES_OF_FEW = 48, TILES_OF_MANY = 24;

INLINE Index block_of(const Shape& s) { return s.in + s.out <= FEW_CHANNELS ? TILES_OF_FEW : TILES_OF_MANY; }

// SIDE x SIDE pixels of each tile and of channels from `channel` up to `end`, transformed by LINE along both axes, as
// [POINTS, count tiles, channels padded], APART between points.
template <class Tile, Index SIDE, void (*LINE)(const Vector*, Vector*)>
INLINE void spread(const float* pixels, const Shape& s, Index channels, Index channel, Index end, Index first,
                   Index count, float* to) {
    constexpr Index INPUTS = Tile::INPUTS;
    const Index wide = padded(end - channel), point = count * wide + APART;
    const Index next_column = channels, next_row = s.width * channels;
    for (Index t = 0; t < count; t++) {
        const Place p = place_of<Tile::OUTPUTS>(s, first + t, SIDE == INPUTS ? 1 : 0, SIDE);
        const float* corner = pixels + (p.image * s.height + p.row) * next_row + p.column * next_column + channel;
        for (Index c = 0; c < wide; c += LANES) {
            Vector lines[INPUTS][SIDE];
            float* target = to + t * wide + c;
            const Index here = end - channel - c;
            if (p.inside && here >= LANES) {
#pragma GCC unroll 6
                for (Index j = 0; j < SIDE; j++) {
                    Vector seen[SIDE], made[INPUTS];
#pragma GCC unroll 6
                    for (Index i = 0; i < SIDE; i++) seen[i] = load(corner + i * next_row + j * next_column + c);
                    LINE(seen, made);
#pragma GCC unroll 6
                    for (Index i = 0; i < INPUTS; i++) lines[i][j] = made[i];
                }
            } else {
                for (Index j = 0; j < SIDE; j++) {
                    Vector seen[SIDE], made[INPUTS];
                    for (Index i = 0; i < SIDE; i++) {
                        const bool there = i >= p.top && i < p.bottom && j >= p.left && j < p.right && here > 0;
                        seen[i] = there ? load(corner + i * next_row + j * next_column + c, here) : Vector{};
                    }
                    LINE(seen, made);
                    for (Index i = 0; i < INPUTS; i++) lines[i][j] = made[i];
                }
            }
#pragma GCC unroll 6
            for (Index i = 0; i < INPUTS; i++) {
                Vector made[INPUTS];
                LINE(lines[i], made);
#pragma GCC unroll 6
                for (Index j = 0; j < INPUTS; j++) store(target + (i * INPUTS + j) * point, made[j]);
            }
        }
    }
}

// [TILES, inner] times [inner, VECTORS vectors of `out`] -> [TILES, VECTORS vectors of `out`].
template <Index TILES, Index VECTORS>
INLINE void product(const float* tiles, Index stride, Index inner, const float* weights, Index out, float* to) {
    Vector sums[TILES][VECTORS];
#pragma GCC unroll 16
    for (Index t = 0; t < TILES; t++)
#pragma GCC unroll 2
        for (Index v = 0; v < VECTORS; v++) sums[t][v] = Vector{};
    for (Index c = 0; c < inner; c++) {
        Vector weight[VECTORS];
#pragma GCC unroll 2
        for (Index v = 0; v < VECTORS; v++) weight[v] = load(weights + c * out + v * LANES);
#pragma GCC unroll 16
        for (Index t = 0; t < TILES; t++)
#pragma GCC unroll 2
            for (Index v = 0; v < VECTORS; v++) sums[t][v] += tiles[t * stride + c] * weight[v];
    }
#pragma GCC unroll 16
    for (Index t = 0; t < TILES; t++)
#pragma GCC unroll 2
        for (Index v = 0; v < VECTORS; v++) store(to + t * out + v * LANES, sums[t][v]);
}

// All tiles of a block, MANY at a time.
template <Index MANY, Index VECTORS>
INLINE void products(const float* tiles, Index stride, Index inner, const float* weights, Index out, Index count,
                     float* to) {
    for (Index k = 0; k < out; k += VECTORS * LANES) {
        Index t = 0;
        for (; t + MANY <= count; t += MANY)
            product<MANY, VECTORS>(tiles + t * stride, stride, inner, weights + k, out, to + t * out + k);
        for (; t < count; t++)
            product<1, VECTORS>(tiles + t * stride, stride, inner, weights + k, out, to + t * out + k);
    }
}

// weights [CHANNELS_, VECTORS vectors of `out`] += [count tiles, CHANNELS_] transposed times [count tiles, out].
template <Index CHANNELS_, Index VECTORS>
INLINE void outer(const float* tiles, Index stride, const float* gradients, Index out, Index count, float* weights) {
    Vector sums[CHANNELS_][VECTORS];
#pragma GCC unroll 16
    for (Index c = 0; c < CHANNELS_; c++)
#pragma GCC unroll 2
        for (Index v = 0; v < VECTORS; v++) sums[c][v] = load(weights + c * out + v * LANES);
    for (Index t = 0; t < count; t++) {
        Vector gradient[VECTORS];
#pragma GCC unroll 2
        for (Index v = 0; v < VECTORS; v++) gradient[v] = load(gradients + t * out + v * LANES);
#pragma GCC unroll 16
        for (Index c = 0; c < CHANNELS_; c++)
#pragma GCC unroll 2
            for (Index v = 0; v < VECTORS; v++) sums[c][v] += tiles[t * stride + c] * gradient[v];
    }
#pragma GCC unroll 16
    for (Index c = 0; c < CHANNELS_; c++)
#pragma GCC unroll 2
        for (Index v = 0; v < VECTORS; v++) store(weights + c * out + v * LANES, sums[c][v]);
}

template <Index MANY, Index VECTORS>
INLINE void outers(const float* tiles, Index in, const float* gradients, Index out, Index count, float* weights) {
    for (Index k = 0; k < out; k += VECTORS * LANES)
        for (Index c = 0; c < in; c += MANY)
            outer<MANY, VECTORS>(tiles + c, in, gradients + k, out, count, weights + c * out + k);
}

template <class Tile>
void transform(const void* kernel, const Shape& s, float* weights) {
    constexpr Index INPUTS = Tile::INPUTS;
    constexpr auto& KERNEL = Tile::KERNEL;
    const Index out = padded(s.out);
    for (Index c = 0; c < s.in; c++)
        for (Index k = 0; k < out; k += LANES) {
            Vector seen[3][3], lines[INPUTS][3];
            for (Index i = 0; i < 3; i++)
                for (Index j = 0; j < 3; j++) {
                    const float* from = static_cast<const float*>(kernel) + ((i * 3 + j) * s.in + c) * s.out + k;
                    seen[i][j] = s.out > k ? load(from, s.out - k) : Vector{};
                }
            for (Index i = 0; i < INPUTS; i++)
                for (Index j = 0; j < 3; j++)
                    lines[i][j] = KERNEL[i][0] * seen[0][j] + KERNEL[i][1] * seen[1][j] + KERNEL[i][2] * seen[2][j];
            for (Index i = 0; i < INPUTS; i++)
                for (Index j = 0; j < INPUTS; j++)
                    store(weights + ((i * INPUTS + j) * s.in + c) * out + k,
                          KERNEL[j][0] * lines[i][0] + KERNEL[j][1] * lines[i][1] + KERNEL[j][2] * lines[i][2]);
        }
}

template <class Tile>
void forward(const void* images, const float* weights, const Shape& s, Index first, Index last, void* outputs,
             float* scratch) {
    constexpr Index INPUTS = Tile::INPUTS, OUTPUTS = Tile::OUTPUTS, POINTS = Tile::POINTS;
    const Index block = block_of(s), in = padded(s.in), out = padded(s.out);
    float* made = scratch + POINTS * (block * in + APART);
    for (Index f = first; f < last; f += block) {
        const Index count = least(block, last - f);
        spread<Tile, INPUTS, Tile::of_inputs>(static_cast<const float*>(images), s, s.in, 0, s.in, f, count, scratch);
        const Index point = count * out + APART;
        for (Index p = 0; p < POINTS; p++) {
            const float* tiles = scratch + p * (count * in + APART);
            const float* weight = weights + p * s.in * out;
            if (out % (2 * LANES))
                products<2 * MANY_TILES, 1>(tiles, in, s.in, weight, out, count, made + p * point);
            else
                products<MANY_TILES, 2>(tiles, in, s.in, weight, out, count, made + p * point);
        }
        for (Index t = 0; t < count; t++) {
            const Place p = place_of<OUTPUTS>(s, f + t, 0, OUTPUTS);
            float* corner = static_cast<float*>(outputs) + ((p.image * s.height + p.row) * s.width + p.column) * s.out;
            for (Index k = 0; k < s.out; k += LANES) {
                Vector lines[OUTPUTS][INPUTS];
                const float* from = made + t * out + k;
#pragma GCC unroll 6
                for (Index j = 0; j < INPUTS; j++) {
                    Vector seen[INPUTS], results[OUTPUTS];
#pragma GCC unroll 6
                    for (Index i = 0; i < INPUTS; i++) seen[i] = load(from + (i * INPUTS + j) * point);
                    Tile::of_products(seen, results);
#pragma GCC unroll 4
                    for (Index i = 0; i < OUTPUTS; i++) lines[i][j] = results[i];
                }
                if (p.inside && s.out - k >= LANES) {
#pragma GCC unroll 4
                    for (Index i = 0; i < OUTPUTS; i++) {
                        Vector results[OUTPUTS];
                        Tile::of_products(lines[i], results);
#pragma GCC unroll 4
                        for (Index j = 0; j < OUTPUTS; j++) store(corner + (i * s.width + j) * s.out + k, results[j]);
                    }
                } else {
                    for (Index i = 0; i < p.bottom; i++) {
                        Vector results[OUTPUTS];
                        Tile::of_products(lines[i], results);
                        for (Index j = 0; j < p.right; j++)
                            store(corner + (i * s.width + j) * s.out + k, results[j], s.out - k);
                    }
                }
            }
        }
    }
}

template <class Tile>
void gradient(const void* images, const void* gradients, const Shape& s, Index first, Index last, Index channel,
              Index end, float* weights, float* scratch) {
    constexpr Index INPUTS = Tile::INPUTS, OUTPUTS = Tile::OUTPUTS, POINTS = Tile::POINTS;
    const Index block = block_of(s), here = padded(end - channel), in = padded(s.in), out = padded(s.out);
    float* changes = scratch + POINTS * (block * here + APART);
    for (Index f = first; f < last; f += block) {
        const Index count = least(block, last - f);
        spread<Tile, INPUTS, Tile::of_inputs>(static_cast<const float*>(images), s, s.in, channel, end, f, count,
                                              scratch);
        spread<Tile, OUTPUTS, Tile::of_gradients>(static_cast<const float*>(gradients), s, s.out, 0, s.out, f, count,
                                                  changes);
        for (Index p = 0; p < POINTS; p++) {
            const float* tiles = scratch + p * (count * here + APART);
            const float* change = changes + p * (count * out + APART);
            float* sums = weights + (p * in + channel) * out;
            if (out % (2 * LANES))
                outers<2 * MANY_CHANNELS, 1>(tiles, here, change, out, count, sums);
            else
                outers<MANY_CHANNELS, 2>(tiles, here, change, out, count, sums);
        }
    }
}

template <class Tile>
std::size_t scratch_of(const Shape& s) {
    return Tile::POINTS * (block_of(s) * (padded(s.in) + padded(s.out)) + 2 * APART);
}

template <class Tile>
Functions of() {
    return {transform<Tile>, forward<Tile>, gradient<Tile>, collect<float, Tile>, scratch_of<Tile>};
}

}  // namespace

Functions functions(Index, Index side) { return side == 3 ? of<Tile3x3>() : of<Tile4x3>(); }

}  // namespace hvd_cifar::SET
