// What a session tells of its rank: the flight record, and the table at its end.
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "core/fork_guard.h"
#include "core/trace/summary.h"
#include "frameworks/observation.h"
#include "frameworks/session.h"
#include "frameworks/session_parts.h"
#include "frameworks/version_text.h"

namespace sirtaki::frameworks {

using core::Status;
using core::trace::Metrics;

namespace {

std::string Hexadecimal(std::uint64_t number) {
  char text[20];
  std::snprintf(text, sizeof text, "%llx", static_cast<unsigned long long>(number));
  return text;
}

}  // namespace

core::trace::FlightRecord Session::Describe(std::string why, core::Duration patience) const {
  core::trace::FlightRecord record;
  if (core::ForkGeneration() == fork_generation_) {
    const Call call(*this);
    if (call.has_parts() && parts_->engine) record = parts_->engine->Describe(patience);
    for (auto& pending : record.pending) pending.key = observation_->KeyText(pending.key);
    if (topology_.size == 1) {
      observation_->observer()->recorder.Read(0, /*to_the_end=*/true, &record.events, &record.lost);
    }
  }
  record.rank = topology_.rank;
  record.size = topology_.size;
  record.host = topology_.host;
  record.pid = getpid();
  record.version = VersionText();
  record.session = Hexadecimal(token_);
  record.why = std::move(why);
  record.fault = fault();
  record.now = core::Clock::now();
  record.offset = observation_->offset();
  const auto since = std::chrono::system_clock::now().time_since_epoch();
  record.unix_us = std::chrono::duration_cast<std::chrono::microseconds>(since).count();
  return record;
}

Status Session::GatherMetrics(std::vector<Metrics>* all) {
  struct Gathered {  // which a thread that is left behind may go on to use
    Metrics own;
    std::vector<Metrics> told;
    std::vector<std::int64_t> rows;
  };
  auto gathered = std::make_shared<Gathered>();
  gathered->own = observation_->observer()->metrics.Read();
  *all = {gathered->own};
  if (topology_.size == 1) return Status::Ok();
  all->assign(static_cast<std::size_t>(topology_.size), Metrics{});
  auto signature = std::make_shared<core::Signature>();
  signature->kind = core::OpKind::kAllGather;
  signature->dtype = core::DType::kU8;
  signature->shape = {static_cast<std::int64_t>(sizeof(Metrics))};
  auto work = std::make_shared<core::Work>();
  work->request.key = core::Key::Named(core::kWorldSet, "#summary");
  work->request.signature = std::move(signature);
  work->rows = 1;
  work->input = &gathered->own;
  work->allocate_output = [gathered](const std::vector<std::int64_t>& rows) -> void* {
    gathered->rows = rows;
    gathered->told.resize(static_cast<std::size_t>(std::accumulate(rows.begin(), rows.end(), 0)));
    return gathered->told.data();
  };
  work->keep_alive = gathered;
  Status status = Submit(work, /*will_wait=*/true);
  if (status.ok()) status = Wait(*work->handle);
  work->handle->Observe();
  auto next = gathered->told.begin();
  for (std::size_t rank = 0; status.ok() && rank < gathered->rows.size(); ++rank) {
    if (gathered->rows[rank] == 1) (*all)[rank] = *next++;  // not that of one which has joined
  }
  return status;
}

void Session::PrintSummary() {
  std::vector<Metrics> all;
  if (!fault().ok() || !GatherMetrics(&all).ok() || topology_.rank != 0) return;
  std::fputs(("sirtaki: what the ranks have done\n" + core::trace::SummaryText(all)).c_str(),
             stderr);
}

}  // namespace sirtaki::frameworks
