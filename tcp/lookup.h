// LookUp finds the addresses of a name.
#pragma once

#include "tcp/greeting.h"

#include <string>
#include <vector>

#include "core/base/status.h"

namespace sirtaki::tcp {

// A name server may be silent for longer than anybody waits: the thread that asks it holds nobody up, and
// is left to itself when nobody waits any more. kInvalidArgument: the name has none now; the system's text.
asio::awaitable<core::Status> LookUp(std::string name, int port,
                                     std::vector<asio::ip::tcp::endpoint>* ends);

}  // namespace sirtaki::tcp
