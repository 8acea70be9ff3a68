// The host half of Horovod's CUDA kernels. NVRTC compiles their device half to PTX when Horovod is built
// (cuda_kernels.py), the driver compiles that for the GPU at the first launch. No launch fails in silence: each throws.

#include "cuda_kernels.h"

#include <cuda.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>

#include "cuda_kernels_ptx.h"

namespace horovod {
namespace common {
namespace {

constexpr int COPY_THREADS = 1024, SCALE_THREADS = 512;
constexpr int BLOCKS_PER_COPY = 8; // as in the names of cuda_kernels.py

[[noreturn]] void Fail(const std::string& call, const std::string& why) {
  throw std::logic_error(call + " failed: " + why);
}

// A function of the driver. Through cudart: the driver's library is no dependency, so that Horovod loads without one.
template <typename Function> Function Driver(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t error = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result);
  if (error != cudaSuccess) {
    Fail(name, cudaGetErrorString(error));
  }
  if (result != cudaDriverEntryPointSuccess || found == nullptr) {
    Fail(name, "the NVIDIA driver lacks it; it needs version 525 or later");
  }
  return reinterpret_cast<Function>(found);
}

void Check(const std::string& call, CUresult result) {
  if (result != CUDA_SUCCESS) {
    Fail(call, "the NVIDIA driver's error " + std::to_string(result) + " (CUresult in cuda.h)");
  }
}

struct Kernels {
  std::unordered_map<std::string, CUkernel> by_name;
  decltype(&cuLaunchKernel) launch;

  Kernels() : launch(Driver<decltype(&cuLaunchKernel)>("cuLaunchKernel")) {
    CUlibrary library;
    Check("cuLibraryLoadData", Driver<decltype(&cuLibraryLoadData)>("cuLibraryLoadData")(
                                   &library, CUDA_KERNELS_PTX, nullptr, nullptr, 0, nullptr, nullptr, 0));
    auto get = Driver<decltype(&cuLibraryGetKernel)>("cuLibraryGetKernel");
    for (const auto& kernel : CUDA_KERNELS_ENTRIES) {
      Check("cuLibraryGetKernel " + kernel.first, get(&by_name[kernel.first], library, kernel.second));
    }
  }
};

template <typename... Arguments>
void Launch(const std::string& name, int64_t blocks, int threads, cudaStream_t stream, Arguments... arguments) {
  if (blocks == 0) {
    return; // the driver takes an empty grid for an error
  }
  static const Kernels kernels; // for all devices: the driver loads it into each context that launches one
  void* pointers[] = {&arguments...};
  // The driver takes a CUkernel where its signature has a CUfunction.
  auto function = reinterpret_cast<CUfunction>(kernels.by_name.at(name));
  Check("cuLaunchKernel " + name, kernels.launch(function, static_cast<unsigned>(blocks), 1, 1, threads, 1, 1, 0, stream,
                                                 pointers, nullptr));
}

// Call `launch` with the type's name in cuda_kernels.py and the factor, in the type in which the kernel multiplies.
template <typename Launcher> void Scaled(DataType dtype, double factor, Launcher launch) {
  static const std::unordered_map<int, std::string> INTEGERS = {
      {HOROVOD_UINT8, "uint8_t"}, {HOROVOD_INT8, "int8_t"}, {HOROVOD_INT32, "int32_t"}, {HOROVOD_INT64, "int64_t"}};
  if (dtype == HOROVOD_FLOAT16) {
    launch("__half", __float2half(static_cast<float>(factor)));
  } else if (dtype == HOROVOD_FLOAT32) {
    launch("float", static_cast<float>(factor));
  } else if (dtype == HOROVOD_FLOAT64) {
    launch("double", factor);
  } else if (INTEGERS.count(dtype)) {
    launch(INTEGERS.at(dtype), factor);
  } else {
    throw std::logic_error("Type " + DataType_Name(dtype) + " cannot be scaled on a GPU.");
  }
}

} // namespace

void BatchedD2DMemcpyCudaImpl(BatchedD2DParams& params, int num_copies, cudaStream_t stream) {
  Launch("batched_memcpy", int64_t(num_copies) * BLOCKS_PER_COPY, COPY_THREADS, stream, params);
}

void BatchedScaledD2DMemcpyCudaImpl(BatchedD2DParams& params, int num_copies, double scale_factor, DataType dtype,
                                    cudaStream_t stream) {
  Scaled(dtype, scale_factor, [&](const std::string& type, auto factor) {
    Launch("batched_scaled_memcpy " + type, int64_t(num_copies) * BLOCKS_PER_COPY, COPY_THREADS, stream, params,
           factor);
  });
}

void ScaleBufferCudaImpl(const void* fused_input_data, void* buffer_data, const int64_t num_elements,
                         double scale_factor, DataType dtype, cudaStream_t stream) {
  // Two halves at a time, where both buffers are aligned to two.
  const bool pairs = dtype == HOROVOD_FLOAT16 &&
                     (reinterpret_cast<uintptr_t>(fused_input_data) | reinterpret_cast<uintptr_t>(buffer_data)) % 4 == 0;
  const int64_t items = pairs ? (num_elements + 1) / 2 : num_elements;
  Scaled(dtype, scale_factor, [&](const std::string& type, auto factor) {
    Launch(pairs ? "scale_buffer_half2" : "scale_buffer " + type, (items + SCALE_THREADS - 1) / SCALE_THREADS,
           SCALE_THREADS, stream, fused_input_data, buffer_data, num_elements, factor);
  });
}

} // namespace common
} // namespace horovod
