#include "ops/cuda/kernels.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "ops/cuda/kernel_bodies.h"

namespace sirtaki::ops::cuda {
namespace {

using core::DType;
using core::ReduceOp;
using core::Status;

constexpr std::int64_t kMostReducingBlocks = 4096;

#define SIRTAKI_NAME(name, ...) #name,
constexpr const char* kKernelNames[] = {SIRTAKI_COPY_KERNELS(SIRTAKI_NAME) SIRTAKI_CONVERT_KERNELS(
    SIRTAKI_NAME) SIRTAKI_REDUCE_KERNELS(SIRTAKI_NAME)};
#undef SIRTAKI_NAME

std::string CopyName(DType from, DType to, bool scaled) {
  if (from == to && !scaled) return "copy_" + std::to_string(core::SizeOf(from));
  return "convert_" + std::string(core::DTypeName(from)) + "_" + std::string(core::DTypeName(to));
}

std::string ReduceName(ReduceOp op, DType dtype) {
  switch (op) {
    case ReduceOp::kMin:
      return "minimum_" + std::string(core::DTypeName(dtype));
    case ReduceOp::kMax:
      return "maximum_" + std::string(core::DTypeName(dtype));
    case ReduceOp::kBitAnd:
      return "bit_and_" + std::to_string(core::SizeOf(dtype));
    case ReduceOp::kBitOr:
      return "bit_or_" + std::to_string(core::SizeOf(dtype));
    default:
      return "bit_xor_" + std::to_string(core::SizeOf(dtype));
  }
}

}  // namespace

// Machine code of an nvcc runs with all drivers of its major version, and later ones.
Status Kernels::CheckDriver(const Api& api, int toolkit) {
  const int needed = toolkit / 1000 * 1000;
  if (needed == 0) return Status::Ok();
  int version = 0;
  Status status = Check(api, api.DriverGetVersion(&version), "cuDriverGetVersion");
  if (!status.ok() || version >= needed) return status;
  return {core::StatusCode::kUnsupported,
          "the driver here is for CUDA " + VersionText(version) +
              ", and the kernels of this build, which nvcc " + VersionText(toolkit) +
              " has compiled, need one for CUDA " + VersionText(needed) +
              " or later: install a later driver, or build with an nvcc of CUDA " +
              std::to_string(version / 1000) + " (CUDAToolkit_ROOT)"};
}

Status Kernels::Load(const std::shared_ptr<Device>& device, const void* image,
                     std::unique_ptr<Kernels>* kernels) {
  std::unique_ptr<Kernels> loaded(new Kernels(device));
  Status status = device->LoadModule(image, &loaded->module_);
  for (const char* name : kKernelNames) {
    if (status.ok()) status = loaded->Find(name, &loaded->functions_[name]);
  }
  if (!status.ok()) {
    return {core::StatusCode::kUnsupported,
            "the kernels of this build do not run on device " + std::to_string(device->index()) +
                ": " + status.message() +
                "; cmake says at its end which nvcc and which GPUs (SIRTAKI_GPU_ARCHITECTURES) it "
                "builds them for, and a GPU later than those needs a driver of that nvcc's CUDA"};
  }
  *kernels = std::move(loaded);
  return Status::Ok();
}

Status Kernels::Find(const std::string& name, FunctionHandle* function) {
  const Api& api = device_->api();
  const std::string symbol = "sirtaki_" + name;
  return Check(api, api.ModuleGetFunction(function, module_, symbol.c_str()),
               ("cuModuleGetFunction of " + symbol).c_str());
}

Status Kernels::Launch(const std::string& name, unsigned blocks, void* table, StreamHandle stream) {
  const Api& api = device_->api();
  const auto found = functions_.find(name);
  if (found == functions_.end()) {
    return {core::StatusCode::kUnsupported, "there is no kernel sirtaki_" + name};
  }
  void* parameters[] = {table};
  return Check(api,
               api.LaunchKernel(found->second, blocks, 1, 1, kThreadsOfABlock, 1, 1, 0, stream,
                                parameters, nullptr),
               ("cuLaunchKernel of sirtaki_" + name).c_str());
}

Status Kernels::Copy(DType from, DType to, std::span<const CopySegment> segments,
                     fusion::Scale scale, const fusion::Identity& identity, StreamHandle stream) {
  const std::string name = CopyName(from, to, !scale.identity());
  CopyTable table{};
  table.factor = scale.factor;
  table.divisor = scale.divisor;
  std::memcpy(table.identity, identity.bytes.data(), sizeof(table.identity));
  const auto launch = [&] {
    if (table.count == 0) return Status::Ok();
    const unsigned blocks = table.first_tiles[table.count];
    Status status = Launch(name, blocks, &table, stream);
    table.count = 0;
    return status;
  };
  for (const CopySegment& segment : segments) {
    if (segment.count == 0) continue;
    const auto tiles = static_cast<unsigned>((segment.count - 1) / kTile + 1);
    table.segments[table.count] = segment;
    table.first_tiles[table.count + 1] = table.first_tiles[table.count] + tiles;
    if (++table.count < CopyTable::kMost) continue;
    if (Status status = launch(); !status.ok()) return status;
  }
  return launch();
}

bool Kernels::Reduces(ReduceOp op, DType dtype) {
  switch (op) {
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      return core::IsFloating(dtype);
    case ReduceOp::kBitAnd:
    case ReduceOp::kBitOr:
    case ReduceOp::kBitXor:
      return core::IsDefined(op, dtype);
    default:
      return false;
  }
}

Status Kernels::Reduce(ReduceOp op, DType dtype, const void* parts, std::int64_t members,
                       std::int64_t count, void* result, StreamHandle stream) {
  ReduceTable table{parts, result, count, static_cast<int>(members)};
  const std::int64_t blocks = std::min<std::int64_t>(
      (count + kThreadsOfABlock - 1) / kThreadsOfABlock, kMostReducingBlocks);
  if (blocks == 0) return Status::Ok();
  return Launch(ReduceName(op, dtype), static_cast<unsigned>(blocks), &table, stream);
}

}  // namespace sirtaki::ops::cuda
