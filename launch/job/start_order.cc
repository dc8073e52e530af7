#include "launch/job/start_order.h"

#include "core/base/byte_codec.h"
#include "core/base/text.h"
#include "launch/base/shell_text.h"

namespace sirtaki::launch {

using core::Status;
using core::StatusCode;

namespace {

constexpr std::string_view kName = "sirtakirun";
constexpr std::size_t kMaxText = std::size_t{4} * 1024 * 1024;

}  // namespace

std::string Encode(const StartOrder& order, std::string_view version) {
  core::ByteWriter writer;
  writer.Varint(order.variables.size());
  for (const auto& [name, value] : order.variables) {
    writer.Text(name);
    writer.Text(value);
  }
  writer.Varint(order.words.size());
  for (const std::string& word : order.words) writer.Text(word);
  const std::string_view bytes = writer.text();
  std::string text(kName);
  text.append(" ").append(version).append(" ").append(std::to_string(bytes.size())).append("\n");
  return text.append(bytes);
}

Status ReadOrderHead(std::string_view line, std::string_view version, std::size_t* length) {
  const std::vector<std::string_view> words = Split(line, ' ');
  if (words.size() != 3 || words[0] != kName) {
    return {StatusCode::kProtocol,
            "its input " + core::Quoted(line) + " is no order of sirtakirun"};
  }
  if (words[1] != version) {
    return {StatusCode::kProtocol, "Sirtaki is " + std::string(version) + " here and " +
                                       core::Escaped(words[1]) +
                                       " where the run was started: install the same version on "
                                       "every host"};
  }
  const auto number = NumberFrom<std::size_t>(words[2], 0, kMaxOrder);
  if (!number) {
    return {StatusCode::kProtocol,
            "its input " + core::Quoted(line) + " is no order of sirtakirun: its length is none"};
  }
  *length = *number;
  return Status::Ok();
}

Status ReadOrder(std::string_view bytes, StartOrder* out) {
  core::ByteReader reader(bytes);
  StartOrder order;
  const std::size_t variables = reader.Count("count of variables", 2);
  for (std::size_t i = 0; i < variables && reader.status().ok(); ++i) {
    std::string name = reader.Text("name", kMaxText);
    order.variables.emplace_back(std::move(name), reader.Text("value", kMaxText));
  }
  const std::size_t words = reader.Count("count of words", 1);
  for (std::size_t i = 0; i < words && reader.status().ok(); ++i) {
    order.words.push_back(reader.Text("word", kMaxText));
  }
  reader.ExpectEnd();
  if (reader.status().ok() && order.words.empty()) reader.Fail("count of words", "no word");
  if (reader.status().ok()) *out = std::move(order);
  return reader.status();
}

}  // namespace sirtaki::launch
