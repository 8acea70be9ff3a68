// What winograd.cc and dots.cc have for one set of instructions, and op.cc gives to TensorFlow.
#pragma once

#include <cstddef>

namespace hvd_cifar {

// A convolution with `taps` x `taps` pixels of a kernel (3, or 5), stride 1, padded with zeros all around. Images lie as
// [images, height, width, channels].
struct Shape {
    std::ptrdiff_t images, height, width, in, out, taps;
};

// A tile is 4 x 4 outputs of 3 x 3 taps, or 2 x 2 of 5 x 5, and sees 6 x 6 pixels; they are counted along rows, then
// down, then from image to image.
std::ptrdiff_t tiles_of(const Shape& shape);

// Channels as they are in scratch and in transformed weights: vectors are full there.
static constexpr std::ptrdiff_t padded(std::ptrdiff_t channels) { return (channels + 15) / 16 * 16; }

constexpr std::ptrdiff_t POINTS = 36;  // transformed weights of a kernel for each pair of channels, 6 x 6

// Functions for kernels of one side, and elements of one type, `half` (bfloat16) or not. Sums are float32.
struct Functions {
    // kernel [taps, taps, in, out] -> weights, of which only `forward` knows the type and the order: room for float32
    // [POINTS, padded(in), padded(out)].
    void (*transform)(const void* kernel, const Shape& shape, float* weights);
    // Outputs of the tiles from `first` up to `last`. `room`: `scratch(shape)` numbers.
    void (*forward)(const void* images, const float* weights, const Shape& shape, std::ptrdiff_t first,
                    std::ptrdiff_t last, void* outputs, float* room);
    // Adds the share of the tiles from `first` up to `last` to the gradient of transformed weights, float32 [POINTS,
    // padded(in), padded(out)], for input channels from `channel` up to `end`, multiples of 16 but for the last one.
    void (*gradient)(const void* images, const void* gradients, const Shape& shape, std::ptrdiff_t first,
                     std::ptrdiff_t last, std::ptrdiff_t channel, std::ptrdiff_t end, float* weights, float* room);
    // Those gradients, the sum of `parts` of them that lie one after the other -> kernel's, [taps, taps, in, out].
    void (*collect)(const float* weights, std::ptrdiff_t parts, const Shape& shape, void* kernel);
    std::size_t (*scratch)(const Shape& shape);
};

// Between what belongs to one point and what to the next: without it all points of a tile fall on the same few lines
// of the cache.
constexpr std::ptrdiff_t APART = 16;

namespace avx512 {
Functions functions(bool half);  // for 3 taps
}
namespace avx2 {
Functions functions(bool half);
}
namespace avx512_bf16 {
Functions functions(std::ptrdiff_t taps);  // for bfloat16
}

}  // namespace hvd_cifar
