#include "frameworks/torch/session/session_set.h"

#include "core/protocol/mismatch.h"
#include "frameworks/torch/tensors/throw.h"

namespace sirtaki::detail {

SessionSet::SessionSet(const std::shared_ptr<SessionState>& of)
    : session(of), members(MembersOf(process_set, of)) {}

SessionSet::SessionSet(const std::shared_ptr<SessionState>& of, const ProcessSet& set)
    : session(of), process_set(set) {
  if (set.membership()) ThrowIfError(of->Check());
  members = MembersOf(set, of);
}

SessionSet SetOf(const ProcessSet& process_set) { return {CurrentSession(), process_set}; }

void CheckRoot(int root_rank, const SessionSet& set) {
  if (set.members.ranks.Contains(root_rank)) return;
  std::string text = "root rank " + std::to_string(root_rank);
  if (set.members.set == core::kWorldSet) {
    text += " is not in the job: its ranks are 0 to " + std::to_string(set.size() - 1);
  } else {
    text += " is not in the process set of " + core::RanksText(set.members.ranks) +
            ": a root is numbered as in the job";
  }
  ThrowInvalid(text);
}

}  // namespace sirtaki::detail
