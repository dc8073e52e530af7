#include "sirtaki/process_set.h"

#include <chrono>
#include <string>
#include <utility>

#include "core/protocol/mismatch.h"
#include "frameworks/torch/calls/agreement.h"
#include "frameworks/torch/calls/early_call.h"
#include "frameworks/torch/calls/tensor_call.h"
#include "frameworks/torch/session/session_state.h"
#include "frameworks/torch/session/set_membership.h"
#include "frameworks/torch/tensors/throw.h"

namespace sirtaki {
namespace {

using detail::AliveSession;
using detail::CallMembers;
using detail::SessionState;
using detail::SetMembership;

CallMembers AllRanks(const SessionState& state) {
  const auto& topology = state.topology();
  return {core::kWorldSet, core::RankRanges::Span(0, topology.size - 1), topology.rank};
}

ProcessSet Made(CallMembers members, const std::shared_ptr<SessionState>& state) {
  return ProcessSet(
      std::make_shared<const SetMembership>(SetMembership{std::move(members), state}));
}

ProcessSet Existing(core::SetNumber number, const std::shared_ptr<SessionState>& state) {
  CallMembers members = AllRanks(*state);
  members.set = number;
  if (auto ranks = state->session().MembersOf(number)) members.ranks = *std::move(ranks);
  return Made(std::move(members), state);
}

// The set's own members, or all ranks of the session.
CallMembers MembersOfAny(const ProcessSet& set) {
  return set.membership() ? set.membership()->members : AllRanks(*AliveSession());
}

std::string DescribeSet(const CallMembers& set) {
  return "process set " + std::to_string(set.set) + " of " + core::RanksText(set.ranks);
}

void CheckOwner(const SetMembership& set, const std::shared_ptr<SessionState>& state) {
  if (set.session.lock() == state) return;
  detail::ThrowInvalid(DescribeSet(set.members) +
                       " was made before shutdown() and ended there; make it again");
}

core::RankRanges RangesOf(const std::vector<int>& ranks) {
  core::RankRanges ranges;
  for (const int rank : ranks) ranges.Add(rank);
  return ranges;
}

ProcessSet Add(const std::vector<int>& ranks, core::TimePoint deadline,
               const std::shared_ptr<SessionState>& state) {
  if (detail::IsEarlyCall(*state)) detail::RefuseEarlyCall("add_process_set()");
  CallMembers members{core::kWorldSet, RangesOf(ranks), state->topology().rank};
  detail::ThrowIfError(state->session().AddSet(members.ranks, deadline, &members.set));
  return Made(std::move(members), state);
}

}  // namespace

namespace detail {

CallMembers MembersOf(const ProcessSet& set, const std::shared_ptr<SessionState>& session) {
  if (!set.membership()) return AllRanks(*session);
  CheckOwner(*set.membership(), session);
  const CallMembers& members = set.membership()->members;
  if (members.set == core::kWorldSet) return members;
  if (!session->session().MembersOf(members.set))
    detail::ThrowInvalid(DescribeSet(members) + " was removed");
  if (!members.ranks.Contains(members.rank)) {
    detail::ThrowInvalid("rank " + std::to_string(members.rank) + " is not in " +
                         DescribeSet(members) + ": only its ranks may call its operations");
  }
  return members;
}

void AddInitialSets(const std::vector<std::vector<int>>& sets, std::chrono::milliseconds timeout,
                    const std::shared_ptr<SessionState>& session) {
  std::vector<std::string> texts;
  for (const std::vector<int>& ranks : sets) texts.push_back(core::RanksText(RangesOf(ranks)));
  AgreeOnList("the process sets of init()", texts, "", session, timeout);
  std::vector<ProcessSet> made;
  for (const std::vector<int>& ranks : sets) {
    made.push_back(Add(ranks, DeadlineAfter(timeout), session));
  }
  session->SetInitialSets(std::move(made));
}

}  // namespace detail

std::uint32_t ProcessSet::id() const noexcept {
  return membership_ ? membership_->members.set : core::kWorldSet;
}

int ProcessSet::rank() const { return static_cast<int>(MembersOfAny(*this).index()); }

int ProcessSet::size() const { return static_cast<int>(MembersOfAny(*this).size()); }

std::vector<int> ProcessSet::ranks() const { return MembersOfAny(*this).ranks.ToVector(); }

bool ProcessSet::included() const { return rank() >= 0; }

ProcessSet add_process_set(const std::vector<int>& ranks, const ProcessSetOptions& options) {
  const auto state = AliveSession();
  return Add(ranks, detail::DeadlineOf(options.timeout()), state);
}

void remove_process_set(const ProcessSet& process_set, const ProcessSetOptions& options) {
  const auto state = AliveSession();
  if (detail::IsEarlyCall(*state)) detail::RefuseEarlyCall("remove_process_set()");
  if (process_set.membership()) CheckOwner(*process_set.membership(), state);
  detail::ThrowIfError(
      state->session().RemoveSet(process_set.id(), detail::DeadlineOf(options.timeout())));
}

ProcessSet world_process_set() {
  const auto state = AliveSession();
  return Made(AllRanks(*state), state);
}

ProcessSet local_process_set() {
  const auto state = AliveSession();
  return Existing(state->session().local_set(), state);
}

ProcessSet cross_process_set() {
  const auto state = AliveSession();
  return Existing(state->session().cross_set(), state);
}

std::vector<ProcessSet> initial_process_sets() { return AliveSession()->InitialSets(); }

}  // namespace sirtaki
