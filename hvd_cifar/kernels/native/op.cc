// TensorFlow operations over winograd.cc (float32) and dots.cc (bfloat16): a convolution and its kernel's gradient. The
// gradient of images is a convolution with the kernel rotated by 180 degrees and its channels swapped.
#include <cpuid.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "tensorflow/core/framework/bfloat16.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/util/work_sharder.h"
#include "winograd.h"

// Bits of a vector that this processor has and winograd.cc is compiled for: 512, 256 (AVX2 with FMA) or 0.
// HVD_CIFAR_VECTORS=256 limits the width; 0 disables the kernels.
extern "C" int hvd_cifar_vectors() {
    static const int bits = [] {
        __builtin_cpu_init();
        const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
        const int most = wide ? 512 : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? 256 : 0;
        const char* said = std::getenv("HVD_CIFAR_VECTORS");
        const int wish = said ? std::atoi(said) : most;
        return wish >= 512 ? most : wish >= 256 ? std::min(most, 256) : 0;
    }();
    return bits;
}

// Whether this processor has dot products of bfloat16 (AVX512-BF16).
extern "C" int hvd_cifar_dots() { return hvd_cifar_vectors() == 512 && __builtin_cpu_supports("avx512bf16"); }

// Whether this processor multiplies bfloat16 in tiles (AMX): leaf 7 of CPUID.
extern "C" int hvd_cifar_tiles() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1);
}

namespace hvd_cifar {

namespace {

using namespace tensorflow;

std::ptrdiff_t tiles_of(const Shape& s) {
    return s.images * ((s.height + s.side - 1) / s.side) * ((s.width + s.side - 1) / s.side);
}

// The convolution in the tiles that take the fewest multiplications. Images of 3, 5, 6 and 9 pixels a side take 0.7 of
// them in tiles of 3 x 3 outputs.
Shape tiled(std::ptrdiff_t images, std::ptrdiff_t height, std::ptrdiff_t width, std::ptrdiff_t in,
            std::ptrdiff_t out, std::ptrdiff_t taps) {
    Shape shape{images, height, width, in, out, taps, 7 - taps};
    Shape smaller = shape;
    smaller.side = 3;
    const bool fewer = tiles_of(smaller) * points_of(3, 3) < tiles_of(shape) * points_of(3, 4);
    return taps == 3 && fewer ? smaller : shape;
}

constexpr std::ptrdiff_t CHANNELS = padded(1);  // the fewest input channels for which one thread sums the gradient
// The kernel's gradient is summed in parts of this many tiles, so the order of additions depends on shapes alone, not on
// the number of threads. Fewer parts cost less.
constexpr std::ptrdiff_t TILES_OF_PART = 1024, MOST_PARTS = 8;

// Why there is no kernel for this type and kernel size here; empty: there is one.
std::string unsupported(bool half, std::ptrdiff_t taps) {
    if (!hvd_cifar_vectors()) return "no AVX2 with FMA, or HVD_CIFAR_VECTORS=0";
    if (half && !hvd_cifar_dots()) return "no AVX512-BF16, which bfloat16 needs";
    return taps == 3 || (half && taps == 5) ? "" : "a kernel is 3 x 3, or 5 x 5 in bfloat16";
}

Functions functions(bool half, const Shape& s) {
    if (half) return avx512_bf16::functions(s.taps, s.side);
    return hvd_cifar_vectors() == 512 ? avx512::functions(s.taps, s.side) : avx2::functions(s.taps, s.side);
}

// Memory of a thread for one purpose. It is kept, since freed memory faults in again page by page. It asks for huge
// pages: a tile's numbers would each lie on a small page, whose addresses may collide in the cache. Null where there
// is no memory.
enum Purpose { SCRATCH, WEIGHTS };
template <Purpose>
float* kept(std::size_t size) {
    constexpr std::size_t HUGE_PAGE = std::size_t{1} << 21;
    thread_local std::unique_ptr<float, decltype(&std::free)> memory(nullptr, &std::free);
    thread_local std::size_t has = 0;
    // At least one page, since aligned_alloc(0) may be null.
    const std::size_t wanted = (size * sizeof(float) / HUGE_PAGE + 1) * HUGE_PAGE;
    if (has < wanted) {
        has = 0;
        memory.reset();
        memory.reset(static_cast<float*>(std::aligned_alloc(HUGE_PAGE, wanted)));
        if (!memory) return nullptr;
        madvise(memory.get(), wanted, MADV_HUGEPAGE);
        std::memset(memory.get(), 0, wanted);
        has = wanted;
    }
    return memory.get();
}

Status no_memory(const Shape& s) {
    return errors::ResourceExhausted("no memory for what a convolution of ", s.in, " to ", s.out,
                                     " channels needs beside its images");
}

template <class T>
class Convolution : public OpKernel {
  public:
    using OpKernel::OpKernel;

    void Compute(OpKernelContext* context) override {
        const Tensor &images = context->input(0), &kernel = context->input(1);
        OP_REQUIRES(context, images.dims() == 4 && kernel.dims() == 4 && kernel.dim_size(0) == kernel.dim_size(1) &&
                    kernel.dim_size(2) == images.dim_size(3),
                    errors::InvalidArgument("images [b, h, w, c] and a kernel [r, r, c, f] are wanted, not ",
                                            images.shape().DebugString(), " and ", kernel.shape().DebugString()));
        const std::string reason = unsupported(sizeof(T) == 2, kernel.dim_size(0));
        OP_REQUIRES(context, reason.empty(), errors::Unimplemented(reason));
        const Shape shape = tiled(images.dim_size(0), images.dim_size(1), images.dim_size(2),
                                  images.dim_size(3), kernel.dim_size(3), kernel.dim_size(0));
        TensorShape wanted = images.shape();
        wanted.set_dim(3, shape.out);
        Tensor* outputs = nullptr;
        OP_REQUIRES_OK(context, context->allocate_output(0, wanted, &outputs));
        if (!outputs->NumElements()) return;
        const Functions to = functions(sizeof(T) == 2, shape);
        const std::ptrdiff_t points = points_of(shape.taps, shape.side);
        float* transformed = kept<WEIGHTS>(points * padded(shape.in) * padded(shape.out));
        OP_REQUIRES(context, transformed, no_memory(shape));
        to.transform(kernel.data(), shape, transformed);
        auto* threads = context->device()->tensorflow_cpu_worker_threads();
        const std::ptrdiff_t cost = points * (shape.in + 8) * (shape.out + 8) / 16;  // cycles of a tile, roughly
        std::atomic<bool> failed{false};
        Shard(threads->num_threads, threads->workers, tiles_of(shape), cost, [&](int64_t first, int64_t last) {
            if (float* room = kept<SCRATCH>(to.scratch(shape)))
                to.forward(images.data(), transformed, shape, first, last, outputs->data(), room);
            else
                failed = true;
        });
        OP_REQUIRES(context, !failed, no_memory(shape));
    }
};

template <class T>
class KernelGradient : public OpKernel {
  public:
    explicit KernelGradient(OpKernelConstruction* context) : OpKernel(context) {
        OP_REQUIRES_OK(context, context->GetAttr("taps", &taps_));
        const std::string reason = unsupported(sizeof(T) == 2, taps_);
        OP_REQUIRES(context, reason.empty(), errors::Unimplemented(reason));
    }

    void Compute(OpKernelContext* context) override {
        const Tensor &images = context->input(0), &gradients = context->input(1);
        bool fit = images.dims() == 4 && gradients.dims() == 4;
        for (int i = 0; fit && i < 3; i++) fit = images.dim_size(i) == gradients.dim_size(i);
        OP_REQUIRES(context, fit,
                    errors::InvalidArgument("images [b, h, w, c] and gradients [b, h, w, f] are wanted, not ",
                                            images.shape().DebugString(), " and ", gradients.shape().DebugString()));
        const Shape shape = tiled(images.dim_size(0), images.dim_size(1), images.dim_size(2),
                                  images.dim_size(3), gradients.dim_size(3), taps_);
        Tensor* kernel = nullptr;
        OP_REQUIRES_OK(context, context->allocate_output(0, {taps_, taps_, shape.in, shape.out}, &kernel));
        if (!kernel->NumElements()) return;
        const std::ptrdiff_t tiles = tiles_of(shape), in = padded(shape.in), out = padded(shape.out);
        const std::ptrdiff_t parts = std::clamp<std::ptrdiff_t>(tiles / TILES_OF_PART, 1, MOST_PARTS);
        const Functions to = functions(sizeof(T) == 2, shape);
        const std::ptrdiff_t points = points_of(shape.taps, shape.side), part_size = points * in * out;
        float* weights = kept<WEIGHTS>(parts * part_size);
        OP_REQUIRES(context, weights, no_memory(shape));
        std::fill_n(weights, parts * part_size, 0.0f);
        auto* threads = context->device()->tensorflow_cpu_worker_threads();
        // Channels are divided only where there are more threads than parts: each share transforms all gradients.
        const std::ptrdiff_t shares =
            std::min<std::ptrdiff_t>((threads->num_threads + parts - 1) / parts, in / CHANNELS);
        const std::ptrdiff_t wide = (in / CHANNELS + shares - 1) / shares * CHANNELS;
        const std::ptrdiff_t cost = tiles / parts * points * (wide + 8) * (out + 8) / 16;
        std::atomic<bool> failed{false};
        Shard(threads->num_threads, threads->workers, parts * shares, cost, [&](int64_t first, int64_t last) {
            float* room = kept<SCRATCH>(to.scratch(shape));
            if (!room) failed = true;
            for (std::ptrdiff_t i = first; room && i < last; i++) {
                const std::ptrdiff_t part = i / shares, channel = i % shares * wide;
                const std::ptrdiff_t end = std::min(channel + wide, shape.in);
                if (channel < end)
                    to.gradient(images.data(), gradients.data(), shape, tiles * part / parts,
                                tiles * (part + 1) / parts, channel, end, weights + part * part_size,
                                room);
            }
        });
        OP_REQUIRES(context, !failed, no_memory(shape));
        to.collect(weights, parts, shape, kernel->data());
    }

  private:
    std::int64_t taps_;
};

Status convolution_shape(shape_inference::InferenceContext* context) {
    shape_inference::ShapeHandle images, kernel, outputs;
    TF_RETURN_IF_ERROR(context->WithRank(context->input(0), 4, &images));
    TF_RETURN_IF_ERROR(context->WithRank(context->input(1), 4, &kernel));
    TF_RETURN_IF_ERROR(context->ReplaceDim(images, 3, context->Dim(kernel, 3), &outputs));
    context->set_output(0, outputs);
    return absl::OkStatus();
}

Status gradient_shape(shape_inference::InferenceContext* context) {
    shape_inference::ShapeHandle images, gradients;
    TF_RETURN_IF_ERROR(context->WithRank(context->input(0), 4, &images));
    TF_RETURN_IF_ERROR(context->WithRank(context->input(1), 4, &gradients));
    std::int64_t taps;
    TF_RETURN_IF_ERROR(context->GetAttr("taps", &taps));
    context->set_output(0, context->MakeShape({context->MakeDim(taps), context->MakeDim(taps),
                                               context->Dim(images, 3), context->Dim(gradients, 3)}));
    return absl::OkStatus();
}

REGISTER_OP("HvdCifarConvolution")
    .Attr("T: {float, bfloat16}")
    .Input("images: T")
    .Input("kernel: T")
    .Output("outputs: T")
    .SetShapeFn(convolution_shape);
REGISTER_OP("HvdCifarKernelGradient")
    .Attr("T: {float, bfloat16}")
    .Attr("taps: int = 3")
    .Input("images: T")
    .Input("gradients: T")
    .Output("kernel: T")
    .SetShapeFn(gradient_shape);

#define REGISTER(T)                                                                                                 \
    REGISTER_KERNEL_BUILDER(Name("HvdCifarConvolution").Device(DEVICE_CPU).TypeConstraint<T>("T"), Convolution<T>); \
    REGISTER_KERNEL_BUILDER(Name("HvdCifarKernelGradient").Device(DEVICE_CPU).TypeConstraint<T>("T"), KernelGradient<T>)
REGISTER(float);
REGISTER(bfloat16);

}  // namespace
}  // namespace hvd_cifar
