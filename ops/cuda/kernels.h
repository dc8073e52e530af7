// Our kernels, on a device that has loaded them.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "core/base/types.h"
#include "fusion/convert.h"
#include "fusion/pack.h"
#include "ops/cuda/device.h"
#include "ops/cuda/kernel_tables.h"

namespace sirtaki::ops::cuda {

// Used by one thread, whose device it is.
class Kernels {
 public:
  // Ok if the driver can load the kernels that the nvcc of this version, KernelToolkit, has
  // compiled, or nobody knows it (0). Else kUnsupported, with what there is and what would do.
  static core::Status CheckDriver(const Api& api, int toolkit);

  // `image`: KernelImage. All of them are found here, for which the device may be waited for: not
  // when they are launched. Errors: kUnsupported on a GPU that it was not built for.
  static core::Status Load(const std::shared_ptr<Device>& device, const void* image,
                           std::unique_ptr<Kernels>* kernels);
  Kernels(const Kernels&) = delete;
  Kernels& operator=(const Kernels&) = delete;

  // All segments in one launch, or in as many as their number needs: packs, unpacks, scales and
  // converts. What has no input gets `identity`, unscaled. The types are equal, or a pair that a
  // reduction travels by; types without an arithmetic take no scale.
  core::Status Copy(core::DType from, core::DType to, std::span<const CopySegment> segments,
                    fusion::Scale scale, const fusion::Identity& identity, StreamHandle stream);

  // Whether Reduce is there: what NCCL does not have, or gives another meaning. Bitwise operations
  // of integers and bool; minimum and maximum of floating types, of which a NaN wins.
  static bool Reduces(core::ReduceOp op, core::DType dtype);
  // `members` vectors of `count` elements that follow each other, in order, into `result`, which
  // may be the first.
  core::Status Reduce(core::ReduceOp op, core::DType dtype, const void* parts, std::int64_t members,
                      std::int64_t count, void* result, StreamHandle stream);

 private:
  explicit Kernels(std::shared_ptr<Device> device) : device_(std::move(device)) {}
  core::Status Find(const std::string& name, FunctionHandle* function);
  core::Status Launch(const std::string& name, unsigned blocks, void* table, StreamHandle stream);

  const std::shared_ptr<Device> device_;
  ModuleHandle module_ = nullptr;
  std::map<std::string, FunctionHandle> functions_;
};

}  // namespace sirtaki::ops::cuda
