#include "ops/groups/row_exchange.h"

#include <algorithm>

namespace sirtaki::ops {

using core::OpKind;
using core::Status;
using core::StatusCode;

bool TotalBytes(const std::vector<std::int64_t>& rows, std::int64_t row_bytes,
                std::int64_t* total) {
  *total = 0;
  for (const std::int64_t r : rows) {
    std::int64_t bytes = 0;
    if (r < 0 || __builtin_mul_overflow(r, row_bytes, &bytes) ||
        __builtin_add_overflow(*total, bytes, total)) {
      return false;
    }
  }
  return true;
}

std::string WrongRows(const core::Key& key, const std::vector<std::int64_t>& rows) {
  std::string text = "the numbers of rows for " + key.ToString() + " are impossible:";
  for (std::size_t m = 0; m < rows.size(); ++m) {
    text +=
        (m == 0 ? " " : ", ") + std::to_string(rows[m]) + " rows of member " + std::to_string(m);
  }
  return text;
}

std::string NoMemoryFor(const core::Key& key) {
  return "out of memory for the result of " + key.ToString();
}

RowExchange::RowExchange(const GroupTask& task)
    : task_(task),
      kind_(task.signature().kind),
      tensors_(task.items.size()),
      members_(static_cast<std::size_t>(task.members->Count())),
      self_(static_cast<std::size_t>(task.members->IndexOf(task.rank))),
      root_(core::HasRoot(kind_)
                ? static_cast<std::size_t>(task.members->IndexOf(task.signature().root))
                : 0) {
  const bool splits = kind_ == OpKind::kAllToAll || kind_ == OpKind::kScatter;
  own_.assign(tensors_ * (splits ? members_ : 1), 0);
  told_.resize(tensors_ * members_);
  const auto members = static_cast<std::int64_t>(members_);
  for (std::size_t t = 0; t < tensors_; ++t) {
    const core::WorkPtr& work = task.items[t].work;
    if (work == nullptr || (kind_ == OpKind::kScatter && !is_root())) continue;
    if (!splits) own_[t] = work->rows;
    for (std::size_t m = 0; splits && m < members_; ++m) {
      const std::int64_t equal =
          kind_ == OpKind::kScatter
              ? core::RowsOf(work->rows, members, static_cast<std::int64_t>(m))
              : work->rows / members;
      own_[m * tensors_ + t] = work->splits.empty() ? equal : work->splits[m];
    }
  }
}

void RowExchange::TakeFrom(const std::vector<std::int64_t>& all) {
  if (kind_ == OpKind::kAllGather || kind_ == OpKind::kGather) {
    told_ = all;
    return;
  }
  const auto take = [&](std::size_t member, std::size_t from, std::size_t count, std::size_t to) {
    std::copy_n(all.begin() + static_cast<std::ptrdiff_t>(member * own_.size() + from), count,
                told_.begin() + static_cast<std::ptrdiff_t>(to));
  };
  if (kind_ == OpKind::kScatter) return take(root_, 0, own_.size(), 0);
  for (std::size_t m = 0; m < members_; ++m) take(m, self_ * tensors_, tensors_, m * tensors_);
}

std::int64_t RowExchange::Giving(std::size_t tensor, std::size_t member) const {
  switch (kind_) {
    case OpKind::kAllGather:
      return own_[tensor];
    case OpKind::kGather:
      return member == root_ ? own_[tensor] : 0;
    default:  // of a scatter's other members all are 0
      return own_[member * tensors_ + tensor];
  }
}

std::int64_t RowExchange::Getting(std::size_t tensor, std::size_t member) const {
  switch (kind_) {
    case OpKind::kGather:
      return is_root() ? told_[member * tensors_ + tensor] : 0;
    case OpKind::kScatter:
      return member == root_ ? told_[self_ * tensors_ + tensor] : 0;
    default:
      return told_[member * tensors_ + tensor];
  }
}

Status RowExchange::PlaceTensor(std::size_t tensor, const Moves& keep, Slices* slices,
                                const Moves& gather) const {
  const GroupItem& item = task_.items[tensor];
  const std::int64_t row_bytes = item.signature->Bytes();
  std::vector<std::int64_t> giving(members_);
  std::vector<std::int64_t> getting(members_);
  for (std::size_t m = 0; m < members_; ++m) {
    giving[m] = Giving(tensor, m);
    getting[m] = Getting(tensor, m);
  }
  std::int64_t got = 0;
  for (const auto* rows : {&giving, &getting}) {
    if (!TotalBytes(*rows, row_bytes, &got)) {
      return {StatusCode::kBackend, WrongRows(task_.KeyOf(item), *rows)};
    }
  }
  if (item.work == nullptr) return Status::Ok();
  std::byte* output = nullptr;
  if (kind_ != OpKind::kGather || is_root()) {
    output = static_cast<std::byte*>(item.work->allocate_output(getting));
    if (got > 0 && output == nullptr) {
      return {StatusCode::kBackend, NoMemoryFor(task_.KeyOf(item))};
    }
  }
  const auto* input = static_cast<const std::byte*>(item.work->input);
  const bool is_even =
      std::adjacent_find(getting.begin(), getting.end(), std::not_equal_to<>()) == getting.end();
  if (gather && kind_ == OpKind::kAllGather && is_even && members_ > 1 && task_.silent.empty()) {
    if (got > 0) gather(input, output, getting.front() * row_bytes);
    return Status::Ok();
  }
  std::size_t m = 0;
  for (const int rank : task_.members->ToVector()) {
    const std::int64_t gives = giving[m] * row_bytes;
    const std::int64_t gets = getting[m] * row_bytes;
    const auto member = static_cast<std::int64_t>(m);
    if (m++ == self_) {
      if (gets > 0) keep(input, output, gets);
    } else if (!task_.silent.Contains(rank)) {
      slices->Send(member, input, gives);
      slices->Receive(member, output, gets);
    }
    // An all-gather gives the same rows to each: they are there once.
    if (kind_ != OpKind::kAllGather && gives > 0) input += gives;
    if (gets > 0) output += gets;
  }
  return Status::Ok();
}

Status RowExchange::Place(const Moves& keep, Slices* slices, const Moves& gather) const {
  for (std::size_t t = 0; t < tensors_; ++t) {
    if (Status status = PlaceTensor(t, keep, slices, gather); !status.ok()) return status;
  }
  return Status::Ok();
}

}  // namespace sirtaki::ops
