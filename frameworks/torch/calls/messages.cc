#include "sirtaki/messages.h"

#include "frameworks/torch/calls/message_call.h"
#include "frameworks/torch/session/session_state.h"
#include "frameworks/torch/tensors/throw.h"

namespace sirtaki {
namespace {

std::shared_ptr<detail::Pending> Start(const P2POp& operation, const MessageOptions& options,
                                       bool will_wait, const Session& session) {
  auto state = detail::StateOf(session);
  detail::ThrowIfError(state->Check());
  detail::CheckMessage(operation, options, *state);
  return detail::StartMessage(operation, options, will_wait, std::move(state));
}

}  // namespace

void send(const at::Tensor& tensor, int to, const MessageOptions& options, const Session& session) {
  Start(P2POp::send(tensor, to, options.tag()), options, /*will_wait=*/true, session)->Results();
}

Handle isend(const at::Tensor& tensor, int to, const MessageOptions& options,
             const Session& session) {
  return Handle(
      Start(P2POp::send(tensor, to, options.tag()), options, /*will_wait=*/false, session));
}

at::Tensor recv_(const at::Tensor& tensor, int from, const MessageOptions& options,
                 const Session& session) {
  return Start(P2POp::receive(tensor, from, options.tag()), options, /*will_wait=*/true, session)
      ->Results()
      .front();
}

Handle irecv(const at::Tensor& tensor, int from, const MessageOptions& options,
             const Session& session) {
  return Handle(
      Start(P2POp::receive(tensor, from, options.tag()), options, /*will_wait=*/false, session));
}

std::vector<Handle> batch_isend_irecv(const std::vector<P2POp>& operations,
                                      const MessageOptions& options, const Session& session) {
  const auto state = detail::StateOf(session);
  detail::ThrowIfError(state->Check());
  for (const P2POp& operation : operations) detail::CheckMessage(operation, options, *state);
  std::vector<Handle> handles;
  handles.reserve(operations.size());
  for (const P2POp& operation : operations) {
    handles.emplace_back(detail::StartMessage(operation, options, /*will_wait=*/false, state));
  }
  return handles;
}

}  // namespace sirtaki
