// The interface between op.cc and the kernels (winograd.cc, dots.cc), which are compiled once for each instruction set.
#pragma once

#include <cstddef>

namespace hvd_cifar {

// A convolution with a kernel of `taps` x `taps` pixels (3 or 5), stride 1, zero padding that keeps the images' size.
// Images are [images, height, width, channels]. A tile has `side` x `side` outputs, and reads side + taps - 1 pixels a
// side. Tiles are numbered along rows, then columns, then images.
struct Shape {
    std::ptrdiff_t images, height, width, in, out, taps, side;
};

// Transformed weights of a kernel for each pair of channels.
static constexpr std::ptrdiff_t points_of(std::ptrdiff_t taps, std::ptrdiff_t side) {
    return (side + taps - 1) * (side + taps - 1);
}

// Number of channels in scratch and in transformed weights: rounded up, so that every vector is full.
static constexpr std::ptrdiff_t padded(std::ptrdiff_t channels) { return (channels + 15) / 16 * 16; }

// Functions for one kernel size, one tile and one type, float32 or bfloat16. Sums are float32.
struct Functions {
    // kernel [taps, taps, in, out] -> weights, in room for float32 [points, padded(in), padded(out)]. Only `forward`
    // reads them: each set of kernels chooses their type and order.
    void (*transform)(const void* kernel, const Shape& shape, float* weights);
    // Outputs of the tiles from `first` up to `last`. `room`: `scratch(shape)` numbers.
    void (*forward)(const void* images, const float* weights, const Shape& shape, std::ptrdiff_t first,
                    std::ptrdiff_t last, void* outputs, float* room);
    // Adds the share of the tiles from `first` up to `last` to the gradient of transformed weights, float32 [points,
    // padded(in), padded(out)], for input channels from `channel` up to `end`, multiples of 16 except for the last one.
    void (*gradient)(const void* images, const void* gradients, const Shape& shape, std::ptrdiff_t first,
                     std::ptrdiff_t last, std::ptrdiff_t channel, std::ptrdiff_t end, float* weights, float* room);
    // Adds up `parts` consecutive gradients of transformed weights, and makes the kernel's, [taps, taps, in, out].
    void (*collect)(const float* weights, std::ptrdiff_t parts, const Shape& shape, void* kernel);
    std::size_t (*scratch)(const Shape& shape);
};

// Numbers of padding between points. Without it all points of a tile share the same few cache sets.
constexpr std::ptrdiff_t APART = 16;

// Tiles have 4 x 4 or 3 x 3 outputs of a 3 x 3 kernel, or 2 x 2 of a 5 x 5 kernel.
namespace avx512 {  // for float32, kernels of 3 x 3
Functions functions(std::ptrdiff_t taps, std::ptrdiff_t side);
}
namespace avx2 {
Functions functions(std::ptrdiff_t taps, std::ptrdiff_t side);
}
namespace avx512_bf16 {  // for bfloat16, kernels of 3 x 3 and 5 x 5
Functions functions(std::ptrdiff_t taps, std::ptrdiff_t side);
}

}  // namespace hvd_cifar
