// A frame is what ranks say at their meeting: a byte, a length and that many bytes.
#pragma once

#include "tcp/greeting.h"

#include <string>
#include <vector>

#include "core/base/status.h"

namespace sirtaki::tcp {

enum class FrameKind : char { kText = '+', kFailure = '!' };
std::string FrameOf(FrameKind kind, const std::string& text);

// kAborted: the other end tells of a failure, in its own words; kProtocol: it does not speak as ranks do;
// kPeerLost: the connection was closed.
asio::awaitable<core::Status> ReadFrame(Socket socket, std::string* text);

// Packed makes many texts one. Unpack takes as many apart as `*texts` has; false: they are not that many.
std::string Packed(const std::vector<std::string>& texts);
bool Unpack(const std::string& packed, std::vector<std::string>* texts);

}  // namespace sirtaki::tcp
