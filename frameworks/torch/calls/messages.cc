#include "sirtaki/messages.h"

#include "frameworks/torch/calls/message_call.h"
#include "frameworks/torch/session/session_state.h"
#include "frameworks/torch/tensors/throw.h"

namespace sirtaki {
namespace {

std::shared_ptr<detail::Pending> Start(const P2POp& operation, const MessageOptions& options,
                                       bool will_wait) {
  auto state = detail::CurrentSession();
  detail::ThrowIfError(state->Check());
  detail::CheckMessage(operation, options, *state);
  return detail::StartMessage(operation, options, will_wait, std::move(state));
}

}  // namespace

void send(const at::Tensor& tensor, int to, const MessageOptions& options) {
  Start(P2POp::send(tensor, to, options.tag()), options, /*will_wait=*/true)->Results();
}

Handle isend(const at::Tensor& tensor, int to, const MessageOptions& options) {
  return Handle(Start(P2POp::send(tensor, to, options.tag()), options, /*will_wait=*/false));
}

at::Tensor recv_(const at::Tensor& tensor, int from, const MessageOptions& options) {
  return Start(P2POp::receive(tensor, from, options.tag()), options, /*will_wait=*/true)
      ->Results()
      .front();
}

Handle irecv(const at::Tensor& tensor, int from, const MessageOptions& options) {
  return Handle(Start(P2POp::receive(tensor, from, options.tag()), options, /*will_wait=*/false));
}

std::vector<Handle> batch_isend_irecv(const std::vector<P2POp>& operations,
                                      const MessageOptions& options) {
  const auto state = detail::CurrentSession();
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
