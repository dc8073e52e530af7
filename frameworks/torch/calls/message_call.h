// Sends and receives as they are submitted.
#pragma once

#include <memory>

#include "frameworks/torch/calls/pending_tensor.h"
#include "frameworks/torch/session/session_state.h"
#include "sirtaki/messages.h"

namespace sirtaki::detail {

// Throws InvalidArgument if nothing can come of it, whatever the peer does.
void CheckMessage(const P2POp& operation, const MessageOptions& options, SessionState& session);

// Submits. Precondition: CheckMessage has passed.
std::shared_ptr<PendingTensor> StartMessage(const P2POp& operation, const MessageOptions& options,
                                            bool will_wait, std::shared_ptr<SessionState> session);

}  // namespace sirtaki::detail
