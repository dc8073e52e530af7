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

// Nothing travels, so nothing is rounded to the type that it would travel as.
void AllReduce(const core::Work& work, const core::Signature& signature) {
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

Status AllGather(const core::Work& work, const core::Signature& signature) {
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
    return {StatusCode::kBackend,
            "cannot allocate the result of " + work.request.key.ToString() + ": " + why};
  }
  Copy(work.input, output,
       work.rows * signature.ElementCount() *
           static_cast<std::int64_t>(core::SizeOf(signature.dtype)));
  return Status::Ok();
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
  switch (signature.kind) {
    case core::OpKind::kAllReduce:
      AllReduce(work, signature);
      break;
    case core::OpKind::kBroadcast:
      Copy(work.input, work.output,
           signature.ElementCount() * static_cast<std::int64_t>(core::SizeOf(signature.dtype)));
      break;
    case core::OpKind::kAllGather:
      return AllGather(work, signature);
    default:
      return {StatusCode::kUnsupported, "not alone"};
  }
  return Status::Ok();
}

}  // namespace sirtaki::frameworks
