#include "frameworks/alone.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <new>
#include <string>

#include "core/mismatch.h"
#include "core/rank_ranges.h"
#include "fusion/convert.h"

namespace sirtaki::frameworks {

using core::DType;
using core::Status;
using core::StatusCode;

namespace {

void Copy(const void* from, void* to, std::int64_t bytes) {
  if (from != to && bytes > 0) std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

// Half types are scaled in float32 and rounded once, as the lanes do.
void ScaleWidened(DType dtype, const void* from, void* to, std::int64_t count, double factor) {
  std::array<float, 1024> wide;
  const auto bytes = static_cast<std::int64_t>(core::SizeOf(dtype));
  const auto* in = static_cast<const std::byte*>(from);
  auto* out = static_cast<std::byte*>(to);
  for (std::int64_t done = 0; done < count;) {
    const std::int64_t part = std::min(count - done, static_cast<std::int64_t>(wide.size()));
    fusion::Convert(dtype, in + done * bytes, DType::kF32, wide.data(), part, {factor, 1});
    fusion::Convert(DType::kF32, wide.data(), dtype, out + done * bytes, part);
    done += part;
  }
}

// Whatever the operation, the result is the tensor. Nothing travels, so nothing is rounded to the
// type that it would travel as.
void Reduce(const core::Work& work, const core::Signature& signature) {
  const std::int64_t count = signature.ElementCount();
  const double factor = signature.prescale * signature.postscale;
  if (factor == 1.0) {
    Copy(work.input, work.output, count * static_cast<std::int64_t>(core::SizeOf(signature.dtype)));
  } else if (fusion::AccumulationType(signature.dtype) != signature.dtype) {
    ScaleWidened(signature.dtype, work.input, work.output, count, factor);
  } else {
    fusion::Convert(signature.dtype, work.input, signature.dtype, work.output, count, {factor, 1});
  }
}

// All rows go from this rank to itself. `key`: for texts.
Status MoveRows(const core::Work& work, const core::Signature& signature, const core::Key& key) {
  void* output = nullptr;
  std::string why;
  try {
    output = work.allocate_output({work.rows});
  } catch (const std::bad_alloc&) {
    why = "out of memory";
  } catch (const std::exception& error) {
    why = error.what();
  }
  if (!why.empty()) {
    return {StatusCode::kBackend, "cannot allocate the result of " + key.ToString() + ": " + why};
  }
  Copy(work.input, output,
       work.rows * signature.ElementCount() *
           static_cast<std::int64_t>(core::SizeOf(signature.dtype)));
  return Status::Ok();
}

// `signature`: of one tensor; `key`: of the call.
Status RunOne(const core::Work& work, const core::Signature& signature, const core::Key& key) {
  switch (signature.kind) {
    case core::OpKind::kAllReduce:
    case core::OpKind::kReduce:
    case core::OpKind::kReduceScatter:
      Reduce(work, signature);
      return Status::Ok();
    case core::OpKind::kBroadcast:
    case core::OpKind::kAllGatherInto:
      Copy(work.input, work.output,
           signature.ElementCount() * static_cast<std::int64_t>(core::SizeOf(signature.dtype)));
      return Status::Ok();
    case core::OpKind::kAllGather:
    case core::OpKind::kGather:
    case core::OpKind::kScatter:
    case core::OpKind::kAllToAll:
      return MoveRows(work, signature, key);
    case core::OpKind::kBarrier:
    case core::OpKind::kSetLimits:
      return Status::Ok();
    case core::OpKind::kAddSet:
    case core::OpKind::kRemoveSet:
    case core::OpKind::kSend:
    case core::OpKind::kReceive:
      break;
  }
  return {StatusCode::kUnsupported, std::string(core::OpKindName(signature.kind)) +
                                        " is not supported in a world of one rank"};
}

}  // namespace

Status RunAlone(const core::Work& work) {
  const core::Request& request = work.request;
  if (!request.invalid.empty()) {
    // The words that several ranks would get.
    const std::string text = core::MismatchText(
        request.key, {{request.signature, request.invalid, core::RankRanges::Single(0)}}, 0);
    return {StatusCode::kInvalidArgument, text,
            core::FailOrigin(request.key, StatusCode::kInvalidArgument, text)};
  }
  const core::Signature& signature = *request.signature;
  const bool absent =
      !request.absent.empty() &&
      std::find(request.absent.begin(), request.absent.end(), false) == request.absent.end();
  if (absent) {
    work.handle->SetAbsentEverywhere();
    return Status::Ok();
  }
  if (signature.parts.empty()) return RunOne(work, signature, request.key);
  for (std::size_t i = 0; i < signature.parts.size(); ++i) {
    // Nobody has what the only rank does not have.
    if (i < request.absent.size() && request.absent[i]) continue;
    Status status = RunOne(*work.parts[i], *signature.parts[i], request.key);
    if (!status.ok()) return status;
  }
  return Status::Ok();
}

}  // namespace sirtaki::frameworks
