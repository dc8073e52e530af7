// libjpeg reports errors by jumping, so no object with a destructor lives between setjmp and the
// calls of it.
#include <csetjmp>
#include <cstddef>
#include <cstdio>  // jpeglib.h takes both for granted
#include <stdexcept>
#include <string>

#include <jerror.h>
#include <jpeglib.h>

#include "images/image.h"

namespace examples {
namespace {

struct Decoder {
  jpeg_decompress_struct jpeg{};
  jpeg_error_mgr errors{};
  std::jmp_buf failed{};
  char message[JMSG_LENGTH_MAX] = {};
};

[[noreturn]] void fail(j_common_ptr jpeg) {
  auto* decoder = static_cast<Decoder*>(jpeg->client_data);
  jpeg->err->format_message(jpeg, decoder->message);
  std::longjmp(decoder->failed, 1);
}

// libjpeg goes on after a warning, with grey for what is missing. Here a file that is cut off is an
// error; the other warnings are common in files that all programs show.
void warn(j_common_ptr jpeg, int level) {
  if (level < 0 && jpeg->err->msg_code == JWRN_JPEG_EOF) fail(jpeg);
}

// False: it failed, and `decoder` has the message.
bool read_header(Decoder* decoder, const std::vector<std::uint8_t>& file) {
  decoder->jpeg.err = jpeg_std_error(&decoder->errors);
  decoder->jpeg.client_data = decoder;  // which jpeg_create_decompress leaves there
  decoder->errors.error_exit = fail;
  decoder->errors.emit_message = warn;
  if (setjmp(decoder->failed) != 0) return false;
  jpeg_create_decompress(&decoder->jpeg);
  jpeg_mem_src(&decoder->jpeg, file.data(), file.size());
  jpeg_read_header(&decoder->jpeg, TRUE);
  const auto space = decoder->jpeg.jpeg_color_space;
  decoder->jpeg.out_color_space = space == JCS_CMYK || space == JCS_YCCK ? JCS_CMYK : JCS_RGB;
  return true;
}

// `line`: memory for one line of the file. A progressive image takes memory for the whole image,
// whatever its size.
bool read_lines(Decoder* decoder, std::uint8_t* pixels, std::uint8_t* line) {
  if (setjmp(decoder->failed) != 0) return false;
  jpeg_decompress_struct& jpeg = decoder->jpeg;
  jpeg_start_decompress(&jpeg);
  while (jpeg.output_scanline < jpeg.output_height) {
    std::uint8_t* const to =
        pixels + std::size_t{jpeg.output_scanline} * jpeg.output_width * kColours;
    JSAMPROW rows[] = {jpeg.out_color_space == JCS_RGB ? to : line};
    jpeg_read_scanlines(&jpeg, rows, 1);
    if (jpeg.out_color_space != JCS_RGB) {
      // The inverted amounts of each colour, and of black, are for printers.
      for (std::size_t x = 0; x < jpeg.output_width; ++x) {
        for (std::size_t colour = 0; colour < kColours; ++colour) {
          to[x * kColours + colour] =
              static_cast<std::uint8_t>(line[4 * x + colour] * line[4 * x + 3] / 255);
        }
      }
    }
  }
  jpeg_finish_decompress(&jpeg);
  return true;
}

}  // namespace

const bool decodes_jpeg = true;

Image decode_jpeg(const std::vector<std::uint8_t>& file) {
  struct Owner {
    Decoder decoder;
    ~Owner() { jpeg_destroy_decompress(&decoder.jpeg); }
  } owner;
  Decoder& decoder = owner.decoder;
  const auto broken = [&] {
    return std::runtime_error(std::string("is a broken JPEG: ") + decoder.message);
  };
  if (!read_header(&decoder, file)) throw broken();
  Image image = make_image(decoder.jpeg.image_width, decoder.jpeg.image_height);
  std::vector<std::uint8_t> line(std::size_t{decoder.jpeg.image_width} * 4);
  if (!read_lines(&decoder, image.pixels.data(), line.data())) throw broken();
  return image;
}

}  // namespace examples
