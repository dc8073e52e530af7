#include "sirtaki/process_set.h"

#include <chrono>
#include <string>
#include <utility>

#include "core/protocol/mismatch.h"
#include "frameworks/torch/calls/agreement.h"
#include "frameworks/torch/calls/tensor_call.h"
#include "frameworks/torch/session/session_state.h"
#include "frameworks/torch/session/set_membership.h"
#include "frameworks/torch/tensors/throw.h"

namespace sirtaki {
namespace {

using detail::SessionState;
using detail::SetMembership;

std::shared_ptr<const SetMembership> World(const std::shared_ptr<SessionState>& state) {
  const auto& topology = state->topology();
  auto membership = std::make_shared<SetMembership>();
  membership->ranks = core::RankRanges::Span(0, topology.size - 1);
  membership->rank = topology.rank;
  membership->session = state;
  return membership;
}

ProcessSet Existing(core::SetNumber number, const std::shared_ptr<SessionState>& state) {
  auto membership = std::make_shared<SetMembership>(*World(state));
  membership->number = number;
  if (auto ranks = state->session().MembersOf(number)) membership->ranks = *std::move(ranks);
  return ProcessSet(std::move(membership));
}

std::shared_ptr<SessionState> AliveSession() {
  auto state = detail::CurrentSession();
  if (state->gone()) detail::ThrowIfError(state->Check());
  return state;
}

// The membership itself, or what all ranks of the session are.
std::shared_ptr<const SetMembership> MembershipOf(const ProcessSet& set) {
  return set.membership() ? set.membership() : World(AliveSession());
}

std::string DescribeSet(const SetMembership& set) {
  return "process set " + std::to_string(set.number) + " of " + core::RanksText(set.ranks);
}

[[noreturn]] void RefuseSet(const std::string& text) {
  detail::ThrowStatus(core::Status(core::StatusCode::kInvalidArgument, text));
}

void CheckOwner(const SetMembership& set, const std::shared_ptr<SessionState>& state) {
  if (set.session.lock() == state) return;
  RefuseSet(DescribeSet(set) + " was made before shutdown() and ended there; make it again");
}

core::TimePoint DeadlineOf(const ProcessSetOptions& options) {
  if (options.timeout().count() < 0) RefuseSet(detail::NegativeTimeoutText(options.timeout()));
  return detail::DeadlineAfter(options.timeout());
}

ProcessSet Add(const std::vector<int>& ranks, core::TimePoint deadline,
               const std::shared_ptr<SessionState>& state) {
  core::RankRanges members;
  for (const int rank : ranks) members.Add(rank);
  core::SetNumber number = core::kWorldSet;
  detail::ThrowIfError(state->session().AddSet(members, deadline, &number));
  auto membership = std::make_shared<SetMembership>();
  membership->number = number;
  membership->ranks = std::move(members);
  membership->rank = state->topology().rank;
  membership->session = state;
  return ProcessSet(std::move(membership));
}

}  // namespace

namespace detail {

CallMembers MembersOf(const ProcessSet& set, const std::shared_ptr<SessionState>& session) {
  CallMembers members;
  members.rank = session->topology().rank;
  if (!set.membership() || set.membership()->number == core::kWorldSet) {
    if (set.membership()) CheckOwner(*set.membership(), session);
    members.ranks = core::RankRanges::Span(0, session->topology().size - 1);
    return members;
  }
  const SetMembership& membership = *set.membership();
  CheckOwner(membership, session);
  if (!session->session().MembersOf(membership.number)) {
    RefuseSet(DescribeSet(membership) + " was removed");
  }
  if (!membership.ranks.Contains(members.rank)) {
    RefuseSet("rank " + std::to_string(members.rank) + " is not in " + DescribeSet(membership) +
              ": only its ranks may call its operations");
  }
  members.set = membership.number;
  members.ranks = membership.ranks;
  return members;
}

void AddInitialSets(const std::vector<std::vector<int>>& sets, std::chrono::milliseconds timeout,
                    const std::shared_ptr<SessionState>& session) {
  std::vector<std::string> texts;
  for (const std::vector<int>& ranks : sets) {
    core::RankRanges members;
    for (const int rank : ranks) members.Add(rank);
    texts.push_back(core::RanksText(members));
  }
  AgreeOnList("the process sets of init()", texts, "", session, timeout);
  std::vector<ProcessSet> made;
  for (const std::vector<int>& ranks : sets) {
    made.push_back(Add(ranks, DeadlineAfter(timeout), session));
  }
  session->SetInitialSets(std::move(made));
}

}  // namespace detail

std::uint32_t ProcessSet::id() const noexcept {
  return membership_ ? membership_->number : core::kWorldSet;
}

int ProcessSet::rank() const {
  const auto set = MembershipOf(*this);
  return static_cast<int>(set->ranks.IndexOf(set->rank));
}

int ProcessSet::size() const { return static_cast<int>(MembershipOf(*this)->ranks.Count()); }

std::vector<int> ProcessSet::ranks() const { return MembershipOf(*this)->ranks.ToVector(); }

bool ProcessSet::included() const { return rank() >= 0; }

ProcessSet add_process_set(const std::vector<int>& ranks, const ProcessSetOptions& options) {
  const auto state = AliveSession();
  return Add(ranks, DeadlineOf(options), state);
}

void remove_process_set(const ProcessSet& process_set, const ProcessSetOptions& options) {
  const auto state = AliveSession();
  if (process_set.membership()) CheckOwner(*process_set.membership(), state);
  detail::ThrowIfError(state->session().RemoveSet(process_set.id(), DeadlineOf(options)));
}

ProcessSet world_process_set() { return ProcessSet(World(AliveSession())); }

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
