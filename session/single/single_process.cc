#include "session/single/single_process.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "core/base/rank_ranges.h"
#include "core/protocol/mismatch.h"
#include "fusion/convert.h"
#include "ops/cuda/device_work.h"

namespace sirtaki::session {

using core::DType;
using core::Status;
using core::StatusCode;
namespace cuda = ops::cuda;

namespace {

// Half types are scaled in float32 and rounded once, as the lanes do.
void ScaleWidened(DType dtype, const void* from, void* to, std::int64_t count, double factor) {
  std::array<float, 1024> wide;
  const std::int64_t bytes = BytesOf(dtype);
  const auto* in = static_cast<const std::byte*>(from);
  auto* out = static_cast<std::byte*>(to);
  for (std::int64_t done = 0; done < count;) {
    const std::int64_t part = std::min(count - done, static_cast<std::int64_t>(wide.size()));
    fusion::Convert(dtype, in + done * bytes, DType::kF32, wide.data(), part, {factor, 1});
    fusion::Convert(DType::kF32, wide.data(), dtype, out + done * bytes, part);
    done += part;
  }
}

void CopyOnHost(DType dtype, const void* from, void* to, std::int64_t count, double factor) {
  if (factor == 1.0) {
    const auto bytes = static_cast<std::size_t>(count) * core::SizeOf(dtype);
    if (from != to && bytes > 0) std::memcpy(to, from, bytes);
  } else if (fusion::AccumulationType(dtype) != dtype) {
    ScaleWidened(dtype, from, to, count, factor);
  } else {
    fusion::Convert(dtype, from, dtype, to, count, {factor, 1});
  }
}

Status CopyOnGpu(cuda::DeviceWork& work, DType dtype, const void* from, void* to,
                 std::int64_t count, double factor, Devices& devices) {
  std::shared_ptr<Gpu> gpu;
  Status status = devices.Find(work.device->index(), &gpu);
  if (!status.ok()) return status;
  status = gpu->Copy(devices.libraries(), dtype, from, to, count, factor, work.producer);
  if (status.ok()) status = gpu->Mark(work.producer, &work.done);
  return status;
}

// The elements times `factor`, from `from` to `to`.
Status Copy(core::Work& work, const core::Signature& signature, const void* from, void* to,
            std::int64_t count, double factor, Devices& devices) {
  if (signature.device == core::DeviceKind::kCuda) {
    return CopyOnGpu(cuda::AsDeviceWork(work), signature.dtype, from, to, count, factor, devices);
  }
  CopyOnHost(signature.dtype, from, to, count, factor);
  return Status::Ok();
}

// The copy is that of one rank's tensor. Integers are truncated behind each factor.
Status CopyReduced(core::Work& work, const core::Signature& signature, Devices& devices) {
  const std::int64_t count = signature.ElementCount();
  const bool twice = core::IsInteger(signature.dtype) && signature.postscale != 1.0;
  const double first = twice ? signature.prescale : signature.prescale * signature.postscale;
  Status status = Copy(work, signature, work.input, work.output, count, first, devices);
  if (!status.ok() || !twice) return status;
  return Copy(work, signature, work.output, work.output, count, signature.postscale, devices);
}

// All rows go from this rank to itself. `key`: for texts.
Status MoveRows(core::Work& work, const core::Signature& signature, const core::Key& key,
                Devices& devices) {
  void* output = nullptr;
  try {
    output = work.allocate_output({work.rows});
  } catch (...) {
    return {StatusCode::kBackend, "cannot allocate the result of " + key.ToString() + ": " +
                                      core::StatusOfException().message()};
  }
  return Copy(work, signature, work.input, output, work.rows * signature.ElementCount(), 1.0,
              devices);
}

// `signature`: of one tensor; `key`: of the call.
Status RunOne(core::Work& work, const core::Signature& signature, const core::Key& key,
              Devices& devices) {
  switch (signature.kind) {
    // Whatever the operation, the result is the tensor. Nothing travels, so nothing is rounded to
    // the type that it would travel as.
    case core::OpKind::kAllReduce:
    case core::OpKind::kReduce:
    case core::OpKind::kReduceScatter:
    case core::OpKind::kBroadcast:
    case core::OpKind::kAllGatherInto:
      return CopyReduced(work, signature, devices);
    case core::OpKind::kAllGather:
    case core::OpKind::kGather:
    case core::OpKind::kScatter:
    case core::OpKind::kAllToAll:
      return MoveRows(work, signature, key, devices);
    case core::OpKind::kBarrier:
      return Status::Ok();
    case core::OpKind::kMakeArena:
    case core::OpKind::kSend:
    case core::OpKind::kReceive:
      break;
  }
  return {StatusCode::kUnsupported, std::string(core::OpKindName(signature.kind)) +
                                        " is not supported in a world of one rank"};
}

}  // namespace

Status RunInSingleProcess(core::Work& work, Devices& devices) {
  const core::Request& request = work.request;
  if (!request.invalid.empty()) {
    // The words that several ranks would get.
    const std::string text = core::MismatchText(
        request.key, {{request.asked, request.invalid, core::RankRanges::Single(0)}}, 0);
    return {StatusCode::kInvalidArgument, text,
            core::FailOrigin(request.key, StatusCode::kInvalidArgument, text)};
  }
  if (request.signature() == nullptr) return Status::Ok();  // a change, which is the caller's
  const core::Signature& signature = *request.signature();
  if (core::AllAbsent(request.absent)) {
    work.handle->SetAbsentParts(request.absent);
    return Status::Ok();
  }
  if (signature.parts.empty()) return RunOne(work, signature, request.key, devices);
  for (std::size_t i = 0; i < signature.parts.size(); ++i) {
    // Nobody has what the only rank does not have.
    if (i < request.absent.size() && request.absent[i]) continue;
    Status status = RunOne(*work.parts[i], *signature.parts[i], request.key, devices);
    if (!status.ok()) return status;
  }
  return Status::Ok();
}

}  // namespace sirtaki::session
