// A program around kernels, for sanitizers that must own the process: reads one launch from a file, gives every buffer
// memory of exactly its size, runs, and writes the buffers back. The file is written by hostshim.py:
//
//   int32 kernel, shim::Launch, int64 bytes of params, params, int64 buffers,
//   a buffer: int64 offset of its pointer in params, int64 bytes, bytes
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

static void read_exactly(void* target, size_t bytes, FILE* file) {
  if (bytes && fread(target, 1, bytes, file) != bytes) abort();
}

int main(int, char** arguments) {
  struct Buffer {
    int64_t offset, bytes;
    void* at;
  };
  FILE* file = fopen(arguments[1], "rb");
  if (!file) abort();
  int32_t kernel;
  shim::Launch launch;
  int64_t bytes, count;
  read_exactly(&kernel, sizeof kernel, file);
  read_exactly(&launch, sizeof launch, file);
  read_exactly(&bytes, sizeof bytes, file);
  std::vector<unsigned char> params(bytes);
  read_exactly(params.data(), bytes, file);
  read_exactly(&count, sizeof count, file);
  std::vector<Buffer> buffers(count);
  for (Buffer& buffer : buffers) {
    read_exactly(&buffer.offset, sizeof buffer.offset, file);
    read_exactly(&buffer.bytes, sizeof buffer.bytes, file);
    buffer.at = malloc(buffer.bytes);
    read_exactly(buffer.at, buffer.bytes, file);
    memcpy(params.data() + buffer.offset, &buffer.at, sizeof buffer.at);
  }
  fclose(file);
  if (KERNELS[kernel](&launch, params.data())) {
    fprintf(stderr, "shim: %s\n", shim_error());
    return 3;
  }
  file = fopen(arguments[1], "wb");
  for (const Buffer& buffer : buffers) fwrite(buffer.at, 1, buffer.bytes, file);
  fclose(file);
  return 0;
}
